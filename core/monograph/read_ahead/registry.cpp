#include "monograph/read_ahead/registry.h"

#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/base/process_wide.h"

namespace monograph {
namespace {

struct Place {
  std::uintptr_t end;
  std::int64_t number;
  std::size_t tensor;
};

struct Open {
  std::map<std::int64_t, std::shared_ptr<ReadAhead>> by_number;
  std::map<std::uintptr_t, Place> places;  // by first address

  void forget(std::int64_t number) {
    by_number.erase(number);
    std::erase_if(places, [&](const auto& place) { return place.second.number == number; });
  }
};

struct Registry {
  Open* open = new Open;
  std::int64_t next_number = 1;

  // What the parent opened has threads that the child has not: it is left as it is.
  void forget_parent() {
    read_ahead::open_count.store(0);
    open = new Open;
  }
};

}  // namespace

std::atomic<int> read_ahead::open_count = 0;

std::int64_t open_read_ahead(std::unique_ptr<ReadAhead> read_ahead) {
  const std::shared_ptr<ReadAhead> shared = std::move(read_ahead);
  const auto registry = ProcessWide<Registry>::hold();
  Open& open = *registry->open;
  const std::int64_t number = registry->next_number++;
  for (std::size_t i = 0; i < shared->tensors().size(); ++i) {
    const MappedBytes& range = shared->tensors()[i].range;
    const std::uintptr_t end = range.address + range.bytes;
    const auto behind = open.places.lower_bound(end);
    if (behind != open.places.begin() && std::prev(behind)->second.end > range.address) {
      open.forget(number);
      throw Error(name_of_file(range.file) + ": bytes " + std::to_string(range.offset) + " to " +
                  std::to_string(range.offset + range.bytes) +
                  " are looked after already, wanted one base_memory for a mapping");
    }
    open.places[range.address] = {end, number, i};
  }
  open.by_number[number] = shared;
  read_ahead::open_count.fetch_add(1);
  return number;
}

void close_read_ahead(std::int64_t number) {
  std::shared_ptr<ReadAhead> closed;
  {
    const auto registry = ProcessWide<Registry>::hold();
    const auto found = registry->open->by_number.find(number);
    if (found == registry->open->by_number.end()) return;
    closed = std::move(found->second);
    registry->open->forget(number);
    read_ahead::open_count.fetch_sub(1);
  }
  closed->stop();  // an operator that waits has a share of it
}

std::shared_ptr<ReadAhead> find_read_ahead(std::int64_t number) {
  const auto registry = ProcessWide<Registry>::hold();
  const auto found = registry->open->by_number.find(number);
  return found == registry->open->by_number.end() ? nullptr : found->second;
}

void read_ahead::note_use(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::shared_ptr<ReadAhead> found;
  std::size_t tensor = 0;
  {
    const auto registry = ProcessWide<Registry>::hold();
    const Open& open = *registry->open;
    const auto behind = open.places.upper_bound(at);
    if (behind == open.places.begin()) return;
    const Place& place = std::prev(behind)->second;
    if (place.end <= at) return;
    found = open.by_number.at(place.number);
    tensor = place.tensor;
  }
  found->use(tensor);
}

}  // namespace monograph
