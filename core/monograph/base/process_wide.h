// Something that a process has once and operators find without being given it: the registries of
// what is read ahead and of what was spilled.
#pragma once

#include <pthread.h>

#include <mutex>
#include <utility>

namespace monograph {

// One State for the process, made when the library is loaded.
//   - Never destroyed: threads may be at it while the process ends.
//   - A fork waits until nobody holds it, so the child has it whole and can take it at once: a
//     worker of a DataLoader that frees what its parent had must not wait for a thread that it does
//     not have. Who holds it therefore neither forks nor waits for another thread.
//   - State::forget_parent(), if there is one, runs in the child: it lets go of what belongs to
//     threads of the parent, without touching it.
template <class State>
class ProcessWide {
  struct Place {
    std::mutex mutex;
    State state;
  };

 public:
  // The state, held while this lives.
  class Held {
   public:
    State* operator->() const { return &place_->state; }
    State& operator*() const { return place_->state; }

   private:
    friend class ProcessWide;
    explicit Held(Place* place) : place_(place), lock_(place->mutex) {}
    Place* place_;
    std::unique_lock<std::mutex> lock_;
  };
  static Held hold() { return Held(kPlace); }

 private:
  static Place* make() {
    auto* made = new Place;
    // It fails without memory alone, and then the program does not start.
    pthread_atfork([] { kPlace->mutex.lock(); }, [] { kPlace->mutex.unlock(); },
                   [] {
                     if constexpr (requires(State & state) { state.forget_parent(); }) {
                       kPlace->state.forget_parent();
                     }
                     kPlace->mutex.unlock();
                   });
    return made;
  }

  inline static Place* const kPlace = make();
};

}  // namespace monograph
