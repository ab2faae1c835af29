#include "timers.h"

#include "abort.h"
#include "deadline.h"
#include "matching.h"

/* How often the timers are looked at, at most. */
#define TICK_NS 2000000u

/* An operation that makes no progress says again what it is ready for after this time, then twice the time and so on.
 */
#define REPEAT_CTS_MIN_NS 40000000u
#define REPEAT_CTS_MAX_NS 1000000000u

/* An acknowledgement has no number and may be lost, with the credit that it gives: a rank that waits sends another. */
static int repeat_cts(struct operation *operation) {
  int status = MLXDIST_OK;
  for (int i = 0; i < operation->in.count && !status; i++) {
    struct peer *peer = operation->in.list[i].group_peer->peer;
    status = matching_free_slots(peer);
    peer->endpoint.ack_now = true;
    if (!status && !transfer_is_done(&operation->in.list[i])) status = matching_send_cts(&operation->in.list[i]);
  }
  return status;
}

static int check_operation(struct operation *operation, uint64_t now) {
  if (!operation->stuck_since_ns || operation->seen_progress != operation->progress_count) {
    operation->seen_progress = operation->progress_count;
    operation->stuck_since_ns = now;
    operation->repeat_cts_at_ns = now + REPEAT_CTS_MIN_NS;
    operation->repeat_cts_after_ns = REPEAT_CTS_MIN_NS;
    deadline_restart(operation);
    return MLXDIST_OK;
  }
  if (now > operation->repeat_cts_at_ns) {
    if (operation->repeat_cts_after_ns < REPEAT_CTS_MAX_NS) operation->repeat_cts_after_ns *= 2;
    operation->repeat_cts_at_ns = now + operation->repeat_cts_after_ns;
    int status = repeat_cts(operation);
    if (status) return status;
  }
  return deadline_check(operation, now);
}

void engine_check_timers(struct engine *engine, uint64_t now) {
  /* `now` may be from before another thread has looked. */
  if ((int64_t)(now - engine->timers_ns) < (int64_t)TICK_NS || engine->ended) return;
  engine->timers_ns = now;
  transport_tick(&engine->transport, now);
  int status = MLXDIST_OK;
  struct operation *operation = engine->active;
  while (operation && !status) {
    status = check_operation(operation, now);
    if (!status) operation = operation->next;
  }
  if (status) engine_fail(engine, operation, status);
}
