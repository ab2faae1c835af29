#include "progress.h"

#include "abort.h"
#include "matching.h"
#include "meeting_wait.h"
#include "operation.h"
#include "progress_thread.h"
#include "thread.h"
#include "timers.h"

static int on_message(struct endpoint *endpoint, struct recv_desc *desc) {
  struct peer *peer = peer_of(endpoint);
  peer->signs_of_life++;
  if (recv_header(desc)->kind == WIRE_ABORT) {
    abort_receive(peer, desc);
    return MLXDIST_OK;
  }
  return matching_deliver(peer, desc);
}

static int on_ack(struct endpoint *endpoint, const struct wire_header *header) {
  struct peer *peer = peer_of(endpoint);
  peer->signs_of_life++;
  if (header->flags & WIRE_CTS) matching_on_cts(peer, header);
  meeting_read(&peer->meeting, header);
  if (meeting_owes_response(&peer->meeting)) {
    endpoint->ack_requested = true;
    endpoint_mark_ack(endpoint);
  }
  return MLXDIST_OK;
}

static void fill_ack(struct endpoint *endpoint, struct wire_header *header) {
  struct peer *peer = peer_of(endpoint);
  if (peer->has_cts) { /* also the last one again: the acknowledgement before may have been lost with its link */
    header->flags |= WIRE_CTS;
    header->group = peer->cts.group;
    header->index = peer->cts.index;
    header->cts = peer->cts.place;
    peer->cts_pending = false;
  }
  if (meeting_write(&peer->meeting, header)) meeting_count_message(peer->engine);
}

static void on_link_down(struct endpoint *endpoint) { progress_wake(peer_of(endpoint)->engine); }

static void on_error(struct transport *transport, int status) {
  struct engine *engine = peer_of(transport->endpoints[0])->engine;
  if (!engine->ended) engine_fail(engine, 0, status);
}

const struct transport_callbacks progress_callbacks = {.on_message = on_message,
                                                       .on_ack = on_ack,
                                                       .fill_ack = fill_ack,
                                                       .on_link_down = on_link_down,
                                                       .on_error = on_error};

static int step_all(struct engine *engine, bool *progressed, struct operation **failed) {
  struct operation *next;
  for (struct operation *operation = engine->active; operation; operation = next) {
    next = operation->next;
    int status = operation_step(operation, progressed);
    *failed = operation;
    if (status) return status;
  }
  return MLXDIST_OK;
}

/* What failed elsewhere does not matter to an operation that has all it needs. */
static void end_failed(struct engine *engine, bool *progressed) {
  struct operation *failed;
  step_all(engine, progressed, &failed);
  engine_end_all(engine);
}

void engine_progress(struct engine *engine, bool *progressed) {
  bool ended = engine->ended;
  struct operation *failed;
  transport_poll(&engine->transport, progressed);
  int status = step_all(engine, progressed, &failed);
  if (status) engine_fail(engine, failed, status);
  transport_flush(&engine->transport, *progressed);
  if (atomic_load_explicit(&engine->failure.status, memory_order_acquire) == MLXDIST_OK) return;
  if (!engine->ended) end_failed(engine, progressed);
  if (!ended) *progressed = true;
}

void engine_wait(struct engine *engine, struct backoff *backoff) {
  bool progressed = false;
  engine_progress(engine, &progressed);
  if (progressed) return;
  engine_unlock(engine);
  uint64_t now = backoff_pause(backoff);
  engine_lock(engine);
  engine_check_timers(engine, now);
}
