#include "operation.h"

#include "debug.h"
#include "error.h"
#include "label.h"
#include "matching.h"
#include "steady_clock.h"

#include <stdlib.h>
#include <string.h>

int operation_new(mlxdist_group *group, const struct wire_descriptor *descriptor, struct operation **result) {
  /* One that has ended is kept, with its lists: allocating them would take as long as a small message. */
  struct operation *operation = atomic_exchange(&group->spare, 0);
  if (!operation) operation = calloc(1, sizeof *operation);
  if (!operation) return fail(MLXDIST_RESOURCES, "out of memory for an operation");
  operation->group = group;
  operation->sends = operation->receives = *descriptor;
  *result = operation;
  return MLXDIST_OK;
}

void operation_destroy(struct operation *operation) {
  if (!operation) return;
  free(operation->rounds);
  free(operation->out.list);
  free(operation->in.list);
  free(operation);
}

void operation_recycle(struct operation *operation) {
  mlxdist_group *group = operation->group;
  free(operation->scratch);
  *operation = (struct operation){.rounds = operation->rounds,
                                  .rounds_capacity = operation->rounds_capacity,
                                  .out = {operation->out.list, 0, operation->out.capacity},
                                  .in = {operation->in.list, 0, operation->in.capacity}};
  operation = atomic_exchange(&group->spare, operation);
  if (operation) operation_destroy(operation);
}

void operation_release(struct operation *operation) {
  if (atomic_fetch_sub(&operation->owners, 1) == 1) operation_recycle(operation);
}

static bool grow(struct operation *operation, void **list, int *capacity, size_t element) {
  int larger = *capacity ? 2 * *capacity : 4;
  void *grown = realloc(*list, (size_t)larger * element);
  if (!grown) {
    operation->status = MLXDIST_RESOURCES;
    return false;
  }
  *list = grown;
  *capacity = larger;
  return true;
}

void operation_round(struct operation *operation) {
  if (operation->round_count == operation->rounds_capacity &&
      !grow(operation, (void **)&operation->rounds, &operation->rounds_capacity, sizeof *operation->rounds))
    return;
  operation->rounds[operation->round_count++] =
      (struct round){.first_out = operation->out.count, .first_in = operation->in.count};
}

static inline bool add(struct operation *operation, struct transfers *transfers, int32_t member, void *data,
                       uint64_t bytes) {
  if (operation->status || (transfers->count == transfers->capacity &&
                            !grow(operation, (void **)&transfers->list, &transfers->capacity, sizeof *transfers->list)))
    return false;
  transfers->list[transfers->count++] = (struct transfer){
      .operation = operation, .group_peer = &operation->group->peers[member], .data = data, .bytes = bytes};
  return true;
}

static inline struct round *last_round(struct operation *operation) {
  return &operation->rounds[operation->round_count - 1];
}

void operation_send(struct operation *operation, int32_t member, const void *data, uint64_t bytes) {
  if (add(operation, &operation->out, member, (void *)data, bytes)) last_round(operation)->outs++;
}

void operation_receive(struct operation *operation, int32_t member, void *data, uint64_t bytes) {
  if (add(operation, &operation->in, member, data, bytes)) last_round(operation)->ins++;
}

void operation_copy(struct operation *operation, void *to, const void *from, uint64_t bytes) {
  if (operation->status || to == from || bytes == 0) return;
  struct round *round = last_round(operation);
  round->copy_to = to;
  round->copy_from = from;
  round->copy_bytes = bytes;
}

char *operation_scratch(struct operation *operation, uint64_t bytes) {
  operation->scratch = bytes ? malloc(bytes) : 0;
  if (bytes && !operation->scratch) operation->status = MLXDIST_RESOURCES;
  return operation->scratch;
}

static uint32_t take(uint64_t taken, struct places *places) {
  return place_on_wire(taken ? taken : places_take(places));
}

void operation_place(struct operation *operation, const mlxdist_call *call) {
  static const mlxdist_call nothing = {.timeout = -1};
  mlxdist_group *group = operation->group;
  const struct transfers *out = &operation->out, *in = &operation->in;
  if (!call) call = &nothing;
  operation->timeout = call->timeout >= 0 ? call->timeout : group->timeout;
  operation->lazy = call->enqueued;
  if (call->call_site) strncpy(operation->call_site, call->call_site, sizeof operation->call_site - 1);
  if (operation_is_collective(operation)) {
    operation->sequence = call->place ? call->place : places_take(&group->collectives);
    operation->place = place_on_wire(operation->sequence);
  } else {
    if (out->count) operation->send_place = take(call->send, &out->list[0].group_peer->sends);
    if (in->count) operation->receive_place = take(call->receive, &in->list[0].group_peer->receives);
  }
  bool of_program = !(group->id & GROUP_INTERNAL) && operation->sends.operation != WIRE_FINALIZE;
  operation->label =
      of_program && !call->enqueued ? label_of_call(group, call->label, operation->sequence) : call->label;
}

/* By what the peer knows it: the place of its operation, and its number among the transfers to, or from, that member.
 */
static inline void identify(struct transfer *transfer, uint16_t *count, uint32_t message_place) {
  const struct operation *operation = transfer->operation;
  struct group_peer *group_peer = transfer->group_peer;
  if (!operation_is_collective(operation)) {
    transfer->place = message_place;
    transfer->index = WIRE_MESSAGE;
    return;
  }
  if (group_peer->counted != operation->place) {
    group_peer->counted = operation->place;
    group_peer->outs = group_peer->ins = 0;
  }
  transfer->place = operation->place;
  transfer->index = (*count)++;
}

static void issue_out(struct transfer *transfer) {
  const struct operation *operation = transfer->operation;
  struct group_peer *group_peer = transfer->group_peer;
  struct endpoint *endpoint = &group_peer->peer->endpoint;
  identify(transfer, &group_peer->outs, operation->send_place);
  if (group_peer->peer->early_count) matching_take_early_cts(transfer);
  if (transfer->bytes >= MR_CACHE_MIN_BYTES) /* all links of a peer are alike */
    transfer->region =
        mr_cache_acquire(endpoint->transport, endpoint->links[0].device, transfer->data, transfer->bytes);
}

static bool sends_to(const struct operation *operation, const struct group_peer *group_peer, int outs) {
  for (int i = 0; i < outs; i++)
    if (operation->out.list[i].group_peer == group_peer) return true;
  return false;
}

/* `outs`: transfers that leave in the same round or before. */
static int issue_in(struct transfer *transfer, int outs) {
  const struct operation *operation = transfer->operation;
  struct group_peer *group_peer = transfer->group_peer;
  int status = MLXDIST_OK;
  identify(transfer, &group_peer->ins, operation->receive_place);
  /* The peer holds back what is large until it knows that this rank has come; what is sent to it says so. */
  if (transfer->bytes > transfer_eager_limit(operation->group->engine) && !sends_to(operation, group_peer, outs))
    status = matching_send_cts(transfer);
  matching_post(transfer);
  return status;
}

/* Notes that the places are issued. */
static int issue_places(struct operation *operation) {
  const struct transfers *out = &operation->out, *in = &operation->in;
  if (operation_is_collective(operation)) {
    return places_issue(&operation->group->collectives, operation->place);
  }
  int status = MLXDIST_OK;
  if (out->count) status = places_issue(&out->list[0].group_peer->sends, operation->send_place);
  if (in->count && !status) status = places_issue(&in->list[0].group_peer->receives, operation->receive_place);
  return status;
}

static void append(struct engine *engine, struct operation *operation) {
  if (engine->active)
    engine->active_last->next = operation;
  else
    engine->active = operation;
  engine->active_last = operation;
  engine->active_count++;
}

int operation_issue(struct operation *operation) {
  mlxdist_group *group = operation->group;
  struct engine *engine = group->engine;
  append(engine, operation);
  engine->handles_in_progress += operation->handled;
  operation->number = ++engine->operations;
  if (!operation_is_collective(operation)) operation->sequence = ++group->messages_issued;
  debug(DEBUG_TRACE, "operation", "starts %s in group %u%s%s", layout_name(&operation->sends, operation->sequence).text,
        group->id & ~GROUP_INTERNAL, operation->call_site[0] ? ", " : "", operation->call_site);
  int status = issue_places(operation);
  for (int i = 0; i < operation->out.count && !status; i++) issue_out(&operation->out.list[i]);
  for (int i = 0, round = 0; i < operation->in.count && !status; i++) {
    while (i >= operation->rounds[round].first_in + operation->rounds[round].ins) round++;
    status = issue_in(&operation->in.list[i], operation->rounds[round].first_out + operation->rounds[round].outs);
  }
  for (int32_t member = 0; member < group->size && engine->unexpected_count && !status; member++) {
    const struct peer *peer = group->peers[member].peer;
    if (peer && peer->unexpected) status = matching_check_unexpected(peer);
  }
  /* What has come for the other operations may have to wait in its slots until this one has ended elsewhere. */
  for (int32_t rank = 0; rank < engine->size && engine->active_count == 2 && !status; rank++)
    status = matching_free_slots(&engine->peers[rank]);
  return status;
}

static void unlink_active(struct engine *engine, const struct operation *operation) {
  struct operation **place = &engine->active, *before = 0;
  while (*place != operation) {
    before = *place;
    place = &before->next;
  }
  *place = operation->next;
  if (engine->active_last == operation) engine->active_last = before;
  engine->active_count--;
}

/* With the lock, so that no locked instruction is needed. */
static inline void count_ended(const struct operation *operation) {
  if (!operation_is_collective(operation)) return;
  uint64_t ended = atomic_load_explicit(&operation->group->collectives_ended, memory_order_relaxed);
  atomic_store_explicit(&operation->group->collectives_ended, ended + 1, memory_order_relaxed);
}

static inline struct operation_counters *counters_of(const struct operation *operation) {
  const struct wire_descriptor *descriptor = &operation->sends;
  unsigned variant = descriptor->reduction % STATS_VARIANTS;
  if (!operation_is_collective(operation))
    variant = (operation->out.count ? STATS_SENDS : 0) | (operation->in.count ? STATS_RECEIVES : 0);
  return &operation->group->counters->operations[STATS_VARIANTS * descriptor->operation + variant];
}

void operation_end(struct operation *operation, int status) {
  struct engine *engine = operation->group->engine;
  uint64_t sent = 0, received = 0;
  unlink_active(engine, operation);
  for (int i = 0; i < operation->out.count; i++) {
    if (operation->out.list[i].region) mr_cache_release(operation->out.list[i].region);
    sent += operation->out.list[i].bytes;
  }
  for (int i = 0; i < operation->in.count; i++) {
    int released = matching_remove(&operation->in.list[i]);
    if (!status) status = released;
    received += operation->in.list[i].bytes;
  }
  count_ended(operation);
  uint64_t now = clock_ns();
  if (!status) {
    meeting_heard(operation, now);
    stats_count(counters_of(operation), sent, received, now - operation->started_ns);
  }
  debug(DEBUG_TRACE, "operation", "ends %s in group %u after %.6f s%s",
        layout_name(&operation->sends, operation->sequence).text, operation->group->id & ~GROUP_INTERNAL,
        (double)(now - operation->started_ns) * 1e-9, status ? ", failed" : "");
  flight_recorder_add(&engine->flight_recorder, operation, status, now);
  operation->status = status;
  bool handled = operation->handled; /* else it may be gone once `ended` is set */
  engine->handles_in_progress -= handled;
  operation_mark_ended(operation);
  if (handled) operation_release(operation);
}
