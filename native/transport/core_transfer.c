/* What the machine itself allows: bytes from one core to another, with no transport around them. */
#include "error.h"
#include "mlxdist.h"
#include "steady_clock.h"
#include "thread.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* On any of `allowed` if `core` is negative: a thread begins with the cores of the one that has made it. */
static int pin(int32_t core, const struct thread_cores *allowed) {
  if (core < 0) return thread_keep_on(allowed);
  if (core >= THREAD_CORES) return EINVAL;
  struct thread_cores one = {0};
  one.words[core / 64] = UINT64_C(1) << core % 64;
  return thread_keep_on(&one);
}

/* The flag has cache lines of its own (128 bytes on Apple's processors), at any address of this struct. */
struct run {
  const mlxdist_core_transfer *transfer;
  struct thread_cores allowed; /* to the caller, before */
  int error;                   /* of the second thread */
  char before[128];
  _Atomic uint64_t flag; /* odd: the caller's bytes are there; even: the second thread's */
  char behind[128];
};

/* The flag follows the bytes: a side that sees it may read them. */
static void give(struct run *run, int side, uint64_t turn) {
  memcpy(run->transfer->shared, run->transfer->sent[side], run->transfer->bytes);
  atomic_store_explicit(&run->flag, turn, memory_order_release);
}

static void take(struct run *run, int side, uint64_t turn) {
  while (atomic_load_explicit(&run->flag, memory_order_acquire) != turn) {
  }
  memcpy(run->transfer->received[side], run->transfer->shared, run->transfer->bytes);
}

static void *answer(void *argument) {
  struct run *run = argument;
  run->error = pin(run->transfer->cores[1], &run->allowed);
  thread_for_polling();
  for (uint64_t trip = 0; trip <= run->transfer->count; trip++) {
    take(run, 1, 2 * trip + 1);
    give(run, 1, 2 * trip + 2);
  }
  return 0;
}

/* The second thread begins during the first round trip, which does not count. */
static void ask(struct run *run, double *nanoseconds) {
  uint64_t begin = 0;
  for (uint64_t trip = 0; trip <= run->transfer->count; trip++) {
    give(run, 0, 2 * trip + 1);
    take(run, 0, 2 * trip + 2);
    uint64_t end = clock_ns();
    if (trip > 0) nanoseconds[trip - 1] = (double)(end - begin) / 2;
    begin = end;
  }
}

int mlxdist_time_core_transfers(const mlxdist_core_transfer *transfer, double *nanoseconds) {
  struct run run = {.transfer = transfer, .allowed = thread_cores()};
  pthread_t thread;
  int error = pin(transfer->cores[0], &run.allowed);
  if (error) return fail(MLXDIST_RESOURCES, "this thread cannot run on core %d: %s", *transfer->cores, strerror(error));
  error = pthread_create(&thread, 0, answer, &run);
  if (!error) {
    ask(&run, nanoseconds);
    pthread_join(thread, 0);
  }
  thread_keep_on(&run.allowed);
  if (error) return fail(MLXDIST_RESOURCES, "there is no second thread: %s", strerror(error));
  if (run.error)
    return fail(MLXDIST_RESOURCES, "no thread can run on core %d: %s", transfer->cores[1], strerror(run.error));
  return MLXDIST_OK;
}
