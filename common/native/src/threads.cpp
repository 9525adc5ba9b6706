// A pool of threads for one caller at a time.
//
// A step of a model is some hundred pieces of work of ten to a hundred microseconds, one right after
// the other, and waking a sleeping thread takes as long as one of them. So a thread that has ended
// its share looks for more for a while before it sleeps: it burns at most that much after each step, and
// nothing when idle. Prefill and decode workers share cores, so what one's threads burn the other lacks.
// Measured over HTTP, both workers on two cores, rows that nobody disturbed (benchmarks/README.md): one
// stream loses a fifth to threads that sleep at once, and nothing between 50 and 1,000 microseconds;
// eight streams lose an eighth to 1,000, and nothing up to 200. Beside other processes that compute,
// 200 loses less than 50: whoever shares the work may lose its core for longer than that.

#include "threads.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <pthread.h>
#include <unistd.h>

namespace kvass {
namespace {

constexpr int kThreadsMax = 256;
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One piece of work. Parts are taken by counting up `next`; a thread that comes late finds no seat.
struct Pool {
  std::mutex busy;  // held by the caller whose work it is
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<int64_t> parts{0};
  std::atomic<int64_t> next{0};
  std::atomic<int> inside{0};     // threads that look at this work
  std::atomic<int> seats{0};      // threads that may still join
  std::atomic<uint32_t> turn{0};  // counts works; what sleeping threads wait on
  std::atomic<uint32_t> left{0};  // counts threads that have left; what the caller waits on
  int started = 0;
  std::atomic<pid_t> owner{0};
};

Pool* pool = new Pool;  // never destroyed: its threads outlive static destructors

void take(Pool& p) {
  for (;;) {
    const int64_t part = p.next.fetch_add(1, std::memory_order_relaxed);
    if (part >= p.parts.load(std::memory_order_relaxed)) return;
    p.body(p.context, part);
  }
}

void join(Pool& p) {
  // `inside` first: the caller closes the seats, then waits until nobody is inside.
  p.inside.fetch_add(1);
  int seats = p.seats.load();
  while (seats > 0 && !p.seats.compare_exchange_weak(seats, seats - 1)) {
  }
  if (seats > 0) take(p);
  p.inside.fetch_sub(1);
  p.left.fetch_add(1);
  p.left.notify_all();
}

void* serve(void* given) {
  Pool* p = static_cast<Pool*>(given);
  uint32_t seen = 0;
  for (;;) {
    uint32_t turn = p->turn.load();
    if (turn == seen) {
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while ((turn = p->turn.load()) == seen) {
        for (int i = 0; i < 16; i++) relax();
        if (std::chrono::steady_clock::now() >= until) {
          p->turn.wait(seen);
          turn = p->turn.load();
          break;
        }
      }
    }
    if (turn == seen) continue;
    seen = turn;
    join(*p);
  }
}

// Starts what is missing of so many threads; fewer will do when the system gives no more. They take
// no signals: those are the interpreter's.
void start(Pool& p, int count) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (; p.started < count; p.started++) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, serve, &p) != 0) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void parallel(int threads, int64_t parts, void (*body)(void*, int64_t), void* context) {
  if (threads > parts) threads = static_cast<int>(parts);
  if (threads > kThreadsMax) threads = kThreadsMax;
  Pool* p = pool;
  if (threads > 1 && p->owner.load() != 0 && p->owner.load() != getpid()) {
    p = pool = new Pool;  // a forked child has none of the threads
  }
  std::unique_lock<std::mutex> lock(p->busy, std::defer_lock);
  if (threads <= 1 || !lock.try_lock()) {
    for (int64_t part = 0; part < parts; part++) body(context, part);
    return;
  }
  p->owner.store(getpid());
  if (p->started < threads - 1) start(*p, threads - 1);
  p->body = body;
  p->context = context;
  p->parts.store(parts);
  p->next.store(0);
  p->seats.store(threads - 1);
  p->turn.fetch_add(1);
  p->turn.notify_all();
  take(*p);
  p->seats.store(0);
  for (int spins = 0; p->inside.load() > 0; spins++) {
    if (spins < 20000) {
      relax();
      continue;
    }
    const uint32_t left = p->left.load();  // a thread lost its core in the middle of its part
    if (p->inside.load() > 0) p->left.wait(left);
  }
}

}  // namespace kvass
