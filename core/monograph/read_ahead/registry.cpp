#include "monograph/read_ahead/registry.h"

#include <pthread.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "monograph/base/error.h"

namespace monograph {
namespace {

struct Place {
  std::uintptr_t end;
  std::int64_t number;
  std::size_t tensor;
};

struct Registry {
  std::mutex mutex;
  std::map<std::int64_t, std::shared_ptr<ReadAhead>> open;
  std::map<std::uintptr_t, Place> places;  // by first address
};

// Never destroyed: threads may be at it while the process ends.
Registry* registry = new Registry;
std::atomic<std::int64_t> next_number = 1;

// The child of a fork has the mutexes as they were and none of the threads. What its parent opened
// is left as it is, never touched again.
void forget_in_child() {
  read_ahead::open_count.store(0);
  registry = new Registry;
}

void erase(Registry& from, std::int64_t number) {
  for (auto place = from.places.begin(); place != from.places.end();)
    place = place->second.number == number ? from.places.erase(place) : std::next(place);
}

}  // namespace

std::atomic<int> read_ahead::open_count = 0;

std::int64_t open_read_ahead(std::unique_ptr<ReadAhead> read_ahead) {
  static const int at_fork = pthread_atfork(nullptr, nullptr, forget_in_child);
  if (at_fork != 0) throw Error("pthread_atfork failed");
  const std::shared_ptr<ReadAhead> shared = std::move(read_ahead);
  const std::int64_t number = next_number++;
  const std::lock_guard lock(registry->mutex);
  for (std::size_t i = 0; i < shared->tensors().size(); ++i) {
    const MappedBytes& range = shared->tensors()[i].range;
    const std::uintptr_t end = range.address + range.bytes;
    const auto behind = registry->places.lower_bound(end);
    if (behind != registry->places.begin() && std::prev(behind)->second.end > range.address) {
      erase(*registry, number);
      throw Error(name_of_file(range.file) + ": bytes " + std::to_string(range.offset) + " to " +
                  std::to_string(range.offset + range.bytes) +
                  " are looked after already, wanted one base_memory for a mapping");
    }
    registry->places[range.address] = {end, number, i};
  }
  registry->open[number] = shared;
  read_ahead::open_count.fetch_add(1);
  return number;
}

void close_read_ahead(std::int64_t number) {
  std::shared_ptr<ReadAhead> closed;
  {
    const std::lock_guard lock(registry->mutex);
    const auto found = registry->open.find(number);
    if (found == registry->open.end()) return;
    closed = std::move(found->second);
    registry->open.erase(found);
    erase(*registry, number);
    read_ahead::open_count.fetch_sub(1);
  }
  closed->stop();  // an operator that waits has a share of it
}

std::shared_ptr<ReadAhead> find_read_ahead(std::int64_t number) {
  const std::lock_guard lock(registry->mutex);
  const auto found = registry->open.find(number);
  return found == registry->open.end() ? nullptr : found->second;
}

void read_ahead::note_use(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::shared_ptr<ReadAhead> found;
  std::size_t tensor = 0;
  {
    const std::lock_guard lock(registry->mutex);
    const auto behind = registry->places.upper_bound(at);
    if (behind == registry->places.begin()) return;
    const Place& place = std::prev(behind)->second;
    if (place.end <= at) return;
    found = registry->open.at(place.number);
    tensor = place.tensor;
  }
  found->use(tensor);
}

}  // namespace monograph
