#include "start.h"

#include "abort.h"
#include "connection.h"
#include "error.h"
#include "meeting_wait.h"
#include "progress.h"
#include "progress_thread.h"
#include "steady_clock.h"
#include "timers.h"

#include <string.h>

static int fail_unusable(struct engine *engine) {
  int status = failure_check(&engine->failure);
  return status ? status : fail(MLXDIST_INVALID_ARGUMENT, "an operation on a group that is finalized");
}

static inline int check_usable(struct engine *engine) {
  return failure_is_set(&engine->failure) || engine->finalized ? fail_unusable(engine) : MLXDIST_OK;
}

/* With the lock, so that no locked instruction is needed; the progress thread reads it without. */
static inline void change_waiters(struct engine *engine, int by) {
  int waiters = atomic_load_explicit(&engine->waiters, memory_order_relaxed);
  atomic_store_explicit(&engine->waiters, waiters + by, memory_order_relaxed);
}

/* Makes progress until the operation has ended or `deadline_ns` (0: none) has come. With the lock, which it lets go of
 * in between. */
static void wait_for(struct operation *operation, uint64_t deadline_ns) {
  struct engine *engine = operation->group->engine;
  struct backoff backoff = {0};
  uint32_t progress_count = engine->progress_count;
  struct deadlock_thread *thread = deadlock_enter(operation, deadline_ns != 0);
  change_waiters(engine, 1);
  while (!atomic_load_explicit(&operation->ended, memory_order_acquire)) {
    bool progressed = false;
    engine_progress(engine, &progressed);
    if (progressed) {
      /* Not for an acknowledgement alone: ranks that wait for another one send some, and would keep each other up. */
      if (progress_count != engine->progress_count)
        count(&operation->group->counters->wait_ns, backoff_reset(&backoff));
      progress_count = engine->progress_count;
      engine_yield(engine);
      continue;
    }
    if (backoff_spins(&backoff)) {
      backoff_pause(&backoff);
      engine_yield(engine);
      continue;
    }
    engine_unlock(engine);
    uint64_t now = backoff_pause(&backoff);
    engine_lock(engine);
    engine_check_timers(engine, now);
    if (deadline_ns && now >= deadline_ns) break;
  }
  change_waiters(engine, -1);
  deadlock_leave(thread);
  count(&operation->group->counters->wait_ns, backoff_reset(&backoff));
}

/* Its status, with the text in mlxdist_last_error(). */
static inline int outcome(struct operation *operation) {
  if (!operation->status) return MLXDIST_OK;
  int failed = failure_check(&operation->group->engine->failure);
  return failed ? failed : operation->status;
}

/* A group of one exchanges nothing. */
static int run_alone(struct operation *operation) {
  int status = check_usable(operation->group->engine);
  for (int i = 0; i < operation->round_count && !status; i++)
    if (operation->rounds[i].copy_bytes)
      memcpy(operation->rounds[i].copy_to, operation->rounds[i].copy_from, operation->rounds[i].copy_bytes);
  operation_mark_ended(operation);
  return status;
}

static int run(struct operation *operation) {
  struct engine *engine = operation->group->engine;
  bool handled = operation->handled;
  engine_lock(engine);
  int status = check_usable(engine);
  int issued = status ? status : operation_issue(operation);
  if (!status && issued) engine_fail(engine, operation, issued);
  if (!status && !handled) wait_for(operation, 0);
  if (!status && handled) {
    bool progressed = false;
    engine_progress(engine, &progressed); /* `operation` may have ended */
  }
  engine_unlock(engine);
  if (!status && handled) progress_wake(engine);
  return status;
}

int operation_start(struct operation *operation, mlxdist_call *call) {
  bool alone = operation->out.count == 0 && operation->in.count == 0;
  int status = operation->status;
  if (status) status = fail(status, "out of memory for an operation of %d rounds", operation->round_count);
  bool handled = operation->handled = call && call->starts;
  if (handled) call->handle = 0;
  if (!status) operation_place(operation, call);
  if (!status) meeting_count(operation);
  if (!status && !alone && !operation->group->usable) status = connection_make_all(operation);
  operation->started_ns = clock_ns();
  operation_set_owners(operation, handled && !alone ? 2 : 1);
  if (!status) status = alone ? run_alone(operation) : run(operation);
  if (handled && !status) {
    call->handle = (mlxdist_handle *)operation;
    return MLXDIST_OK;
  }
  if (!status) status = outcome(operation);
  operation_recycle(operation);
  return status;
}

int mlxdist_handle_done(mlxdist_handle *handle) {
  return atomic_load_explicit(&((struct operation *)handle)->ended, memory_order_acquire);
}

int mlxdist_handle_wait(mlxdist_handle *handle, double timeout) {
  struct operation *operation = (struct operation *)handle;
  if (timeout != 0 && !mlxdist_handle_done(handle)) {
    engine_lock(operation->group->engine);
    wait_for(operation, timeout > 0 ? clock_ns() + (uint64_t)(timeout * 1e9) : 0);
    engine_unlock(operation->group->engine);
  }
  if (mlxdist_handle_done(handle)) return outcome(operation);
  return fail(MLXDIST_TIMEOUT, "the operation has not ended after %g s; it goes on", timeout);
}

void mlxdist_handle_free(mlxdist_handle *handle) {
  if (handle) operation_release((struct operation *)handle);
}
