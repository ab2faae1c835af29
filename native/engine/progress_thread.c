#include "progress_thread.h"

#include "error.h"
#include "progress.h"
#include "side_channel.h"
#include "steady_clock.h"
#include "thread.h"
#include "timers.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#define IDLE_NAP_NS 15000000u
#define UNSETTLED_NAP_NS 5000000u
/* With an operation to drive: short naps at first, since a core may be all that the program has. */
#define FIRST_NAP_NS 20000u
#define LONGEST_NAP_NS 500000u

/* Sleeps until it is called, or for `nap` nanoseconds. False when the thread is to end. */
static bool sleep_for(struct engine *engine, uint64_t nap) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until); /* the clock of condition variables, where macOS has no choice */
  until.tv_nsec += (long)nap;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  pthread_mutex_lock(&engine->progress_lock);
  int status = 0;
  while (!engine->progress_called && !engine->progress_ends && status != ETIMEDOUT)
    status = pthread_cond_timedwait(&engine->progress_wanted, &engine->progress_lock, &until);
  engine->progress_called = false;
  bool goes_on = !engine->progress_ends;
  pthread_mutex_unlock(&engine->progress_lock);
  return goes_on;
}

/* Makes progress, if no other thread does. Returns how long to sleep, 0 for not at all. */
static uint64_t turn(struct engine *engine, uint64_t last_nap) {
  if (atomic_load_explicit(&engine->waiters, memory_order_relaxed) > 0) return UNSETTLED_NAP_NS;
  if (pthread_mutex_trylock(&engine->lock)) return FIRST_NAP_NS;
  bool progressed = false;
  engine_progress(engine, &progressed);
  engine_check_timers(engine, clock_ns());
  bool busy = engine->handles_in_progress > 0, settled = transport_is_settled(&engine->transport);
  engine_unlock(engine);
  if (busy && progressed) return 0;
  if (!busy) return settled ? IDLE_NAP_NS : UNSETTLED_NAP_NS;
  uint64_t nap = last_nap + last_nap / 2;
  return nap < FIRST_NAP_NS ? FIRST_NAP_NS : nap > LONGEST_NAP_NS ? LONGEST_NAP_NS : nap;
}

static void *run(void *argument) {
  struct engine *engine = argument;
  uint64_t nap = 0;
  thread_for_polling();
  atomic_store(&engine->progress_id, thread_id());
  do {
    nap = turn(engine, nap);
    side_channel_send_reconnects(engine);
    if (nap == 0) thread_yield();
  } while (sleep_for(engine, nap));
  return 0;
}

int progress_start(struct engine *engine) {
  sigset_t all, before;
  sigfillset(&all); /* signals are for the program's own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&engine->progress, 0, run, engine);
  pthread_sigmask(SIG_SETMASK, &before, 0);
  if (error) return fail(MLXDIST_RESOURCES, "the progress thread cannot be started: %s", strerror(error));
  engine->progress_runs = true;
  return MLXDIST_OK;
}

void progress_stop(struct engine *engine) {
  if (!engine->progress_runs) return;
  pthread_mutex_lock(&engine->progress_lock);
  engine->progress_ends = true;
  pthread_cond_signal(&engine->progress_wanted);
  pthread_mutex_unlock(&engine->progress_lock);
  pthread_join(engine->progress, 0);
  engine->progress_runs = false;
}
