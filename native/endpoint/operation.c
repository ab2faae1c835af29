#include "operation.h"

#include "connection.h"
#include "deadline.h"
#include "debug.h"
#include "matching.h"
#include "progress.h"
#include "region.h"
#include "standstill.h"

#include <stdlib.h>
#include <string.h>

const mlxdist_group *operation_group(const struct operation *operation) { return operation->group; }

bool operation_is_collective(const struct operation *operation) { return operation->sends.operation != WIRE_SEND; }

static int check_usable(mlxdist_group *group) {
  int status = failure_check(&group->engine->failure);
  if (!status && group->engine->finalized)
    status = fail(MLXDIST_INVALID_ARGUMENT, "an operation on a group that is finalized");
  return status;
}

int operation_new(mlxdist_group *group, const struct wire_descriptor *descriptor, struct operation **result) {
  int status = check_usable(group);
  if (status) return status;
  /* One that has ended is kept, with its lists: allocating them would take as long as a small message. */
  struct operation *operation = atomic_exchange(&group->spare, 0);
  if (!operation) operation = calloc(1, sizeof *operation);
  if (!operation) return fail(MLXDIST_RESOURCES, "out of memory for an operation");
  operation->group = group;
  operation->sends = operation->receives = *descriptor;
  operation->timeout = deadline_for(group);
  *result = operation;
  return MLXDIST_OK;
}

static void operation_free(struct operation *operation) {
  mlxdist_group *group = operation->group;
  free(operation->scratch);
  *operation = (struct operation){.rounds = operation->rounds,
                                  .rounds_room = operation->rounds_room,
                                  .out = {operation->out.list, 0, operation->out.room},
                                  .in = {operation->in.list, 0, operation->in.room}};
  operation = atomic_exchange(&group->spare, operation);
  if (operation) operation_destroy(operation);
}

void operation_destroy(struct operation *operation) {
  if (!operation) return;
  free(operation->rounds);
  free(operation->out.list);
  free(operation->in.list);
  free(operation);
}

static bool grow(struct operation *operation, void **list, int count, int *room, size_t element) {
  if (count < *room) return true;
  int larger = *room ? 2 * *room : 4;
  void *grown = realloc(*list, (size_t)larger * element);
  if (!grown) {
    operation->status = MLXDIST_RESOURCES;
    return false;
  }
  *list = grown;
  *room = larger;
  return true;
}

void operation_round(struct operation *operation) {
  if (!grow(operation, (void **)&operation->rounds, operation->round_count, &operation->rounds_room,
            sizeof *operation->rounds))
    return;
  operation->rounds[operation->round_count++] =
      (struct round){.first_out = operation->out.count, .first_in = operation->in.count};
}

static bool add(struct operation *operation, struct streams *streams, int32_t member, void *data, uint64_t bytes) {
  if (operation->status ||
      !grow(operation, (void **)&streams->list, streams->count, &streams->room, sizeof *streams->list))
    return false;
  streams->list[streams->count++] =
      (struct stream){.operation = operation, .lane = &operation->group->lanes[member], .data = data, .bytes = bytes};
  return true;
}

static struct round *last_round(struct operation *operation) { return &operation->rounds[operation->round_count - 1]; }

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

void operation_fold(struct operation *operation, struct fold fold) {
  if (operation->status) return;
  last_round(operation)->folds = true;
  last_round(operation)->fold = fold;
}

char *operation_scratch(struct operation *operation, uint64_t bytes) {
  operation->scratch = bytes ? malloc(bytes) : 0;
  if (bytes && !operation->scratch) operation->status = MLXDIST_RESOURCES;
  return operation->scratch;
}

void operation_receives(struct operation *operation, const struct wire_descriptor *descriptor) {
  operation->receives = *descriptor;
}

/* The place among the collectives of the group: one number for the whole operation, wherever it sends to. */
static void take_order(struct operation *operation) {
  const mlxdist_group *group = operation->group;
  for (int32_t member = 0; member < group->size; member++) group->lanes[member].order++;
  for (int i = 0; i < operation->out.count; i++) operation->out.list[i].order = operation->out.list[i].lane->order;
  for (int i = 0; i < operation->in.count; i++) operation->in.list[i].order = operation->in.list[i].lane->order;
}

static bool sends_to(const struct operation *operation, const struct lane *lane, int outs) {
  for (int i = 0; i < outs; i++)
    if (operation->out.list[i].lane == lane) return true;
  return false;
}

/* `outs`: so many streams leave in the same round or before. */
static int issue_in(struct stream *stream, int outs) {
  struct operation *operation = stream->operation;
  int status = MLXDIST_OK;
  stream->number = ++stream->lane->received;
  /* The peer holds back what is large until it knows that this rank has come; what is sent to it tells it. */
  if (stream->bytes > stream_unasked_bytes(operation->group->engine) && !sends_to(operation, stream->lane, outs))
    status = peer_tell_ready(stream->lane->peer, operation->group->id, stream->number);
  matching_expect(stream);
  return status;
}

#define NAME_BYTES 192

static const char *name(const struct operation *operation, char *text) {
  layout_name(&operation->sends, operation->sequence, text, NAME_BYTES);
  return text;
}

/* With the lock: it is in progress from now on. */
static void issue(struct operation *operation) {
  struct engine *engine = operation->group->engine;
  if (engine->active)
    engine->active_last->next = operation;
  else
    engine->active = operation;
  engine->active_last = operation;
  engine->active_count++;
  engine->unattended += operation->handled;
  operation->number = ++engine->operations;
  mlxdist_group *group = operation->group;
  operation->sequence = operation_is_collective(operation) ? ++group->collectives_issued : ++group->messages_issued;
  debug(DEBUG_TRACE, "operation", "starts %s in group %u%s%s", name(operation, (char[NAME_BYTES]){""}),
        group->id & ~GROUP_HIDDEN, operation->place[0] ? ", " : "", operation->place);
  if (operation->ordered) take_order(operation);
  for (int i = 0; i < operation->out.count; i++) {
    operation->out.list[i].number = ++operation->out.list[i].lane->sent;
    region_enter(&operation->out.list[i]);
  }
  int status = MLXDIST_OK;
  for (int i = 0, round = 0; i < operation->in.count && !status; i++) {
    while (i >= operation->rounds[round].first_in + operation->rounds[round].ins) round++;
    status = issue_in(&operation->in.list[i], operation->rounds[round].first_out + operation->rounds[round].outs);
  }
  for (int32_t member = 0; member < operation->group->size && operation->ordered && !status; member++)
    if (operation->group->lanes[member].peer) status = matching_check_early(operation->group->lanes[member].peer);
  /* What has come for the other operations may have to wait in its slots until this one has ended elsewhere. */
  for (int32_t rank = 0; rank < engine->size && engine->active_count == 2 && !status; rank++)
    status = matching_make_room(&engine->peers[rank]);
  if (status) engine_fail(engine, operation, status);
}

static void drop(struct operation *operation) {
  if (atomic_fetch_sub(&operation->owners, 1) == 1) operation_free(operation);
}

/* With the lock. */
void operation_end(struct operation *operation, int status) {
  struct engine *engine = operation->group->engine;
  struct group_counters *counters = &operation->group->counters;
  struct operation **place = &engine->active, *before = 0;
  while (*place != operation) {
    before = *place;
    place = &before->next;
  }
  *place = operation->next;
  if (engine->active_last == operation) engine->active_last = before;
  engine->active_count--;
  for (int i = 0; i < operation->out.count; i++) region_leave(&operation->out.list[i]);
  for (int i = 0; i < operation->in.count; i++) {
    int released = matching_forget(&operation->in.list[i]);
    if (!status) status = released;
  }
  count(operation_is_collective(operation) ? &counters->collectives : &counters->point_to_point, 1);
  uint64_t now = clock_ns();
  if (!status) meeting_heard(operation, now);
  count(&counters->operation_ns, now - operation->started_ns);
  debug(DEBUG_TRACE, "operation", "ends %s in group %u after %.6f s%s", name(operation, (char[NAME_BYTES]){""}),
        operation->group->id & ~GROUP_HIDDEN, (double)(now - operation->started_ns) * 1e-9, status ? ", failed" : "");
  flight_keep(&engine->flight, operation, status, now);
  operation->status = status;
  bool handled = operation->handled; /* else it may be gone once `ended` is set */
  engine->unattended -= handled;
  atomic_store_explicit(&operation->ended, 1, memory_order_release);
  if (handled) drop(operation);
}

/* With the lock, so that no locked instruction is needed; the progress thread reads it without. */
static void change_waiters(struct engine *engine, int by) {
  int waiters = atomic_load_explicit(&engine->waiters, memory_order_relaxed);
  atomic_store_explicit(&engine->waiters, waiters + by, memory_order_relaxed);
}

/* Takes turns until the operation has ended or `deadline_ns` (0: none) has come. With the lock, which it lets go of
 * in between. */
static void wait_for(struct operation *operation, uint64_t deadline_ns) {
  struct engine *engine = operation->group->engine;
  struct waiting wait = {0};
  uint32_t moves = engine->moves;
  struct waiting_thread *thread = standstill_wait(operation, deadline_ns != 0);
  change_waiters(engine, 1);
  while (!atomic_load_explicit(&operation->ended, memory_order_acquire)) {
    bool moved = false;
    engine_turn(engine, &moved);
    if (moved) {
      /* Not for an acknowledgement alone: ranks that wait for another one send some, and would keep each other up. */
      if (moves != engine->moves) count(&operation->group->counters.wait_ns, wait_over(&wait));
      moves = engine->moves;
      engine_yield(engine);
      continue;
    }
    if (wait_spins(&wait)) {
      wait_turn(&wait);
      engine_yield(engine);
      continue;
    }
    engine_unlock(engine);
    uint64_t now = wait_turn(&wait);
    engine_lock(engine);
    engine_look_at_timers(engine, now);
    if (deadline_ns && now >= deadline_ns) break;
  }
  change_waiters(engine, -1);
  standstill_go_on(thread);
  count(&operation->group->counters.wait_ns, wait_over(&wait));
}

/* Its status, with the text in mlxdist_last_error(). */
static int outcome(struct operation *operation) {
  if (!operation->status) return MLXDIST_OK;
  int failed = failure_check(&operation->group->engine->failure);
  return failed ? failed : operation->status;
}

/* A group of one exchanges nothing. */
static int run_alone(struct operation *operation) {
  for (int i = 0; i < operation->round_count; i++)
    if (operation->rounds[i].copy_bytes)
      memcpy(operation->rounds[i].copy_to, operation->rounds[i].copy_from, operation->rounds[i].copy_bytes);
  atomic_store_explicit(&operation->ended, 1, memory_order_release);
  return MLXDIST_OK;
}

static int start(struct operation *operation) {
  struct engine *engine = operation->group->engine;
  bool handled = operation->handled;
  engine_lock(engine);
  int status = check_usable(operation->group);
  if (!status) issue(operation);
  if (!status && !handled) wait_for(operation, 0);
  if (!status && handled) {
    bool moved = false;
    engine_turn(engine, &moved); /* `operation` may have ended, and with its handle freed elsewhere be gone */
  }
  engine_unlock(engine);
  if (!status && handled) progress_call(engine);
  return status;
}

int operation_start(struct operation *operation, mlxdist_handle **handle) {
  bool alone = operation->out.count == 0 && operation->in.count == 0;
  int status = operation->status;
  if (status) status = fail(status, "out of memory for an operation of %d rounds", operation->round_count);
  operation->handled = handle != 0;
  operation->ordered = !handle && operation_is_collective(operation) && !(operation->group->id & GROUP_HIDDEN);
  if (!status) meeting_count(operation);
  if (!status && !alone) status = connection_make_all(operation);
  operation->started_ns = clock_ns();
  memcpy(operation->place, flight_place(), sizeof operation->place);
  atomic_store_explicit(&operation->owners, handle && !alone ? 2 : 1, memory_order_relaxed);
  if (handle) *handle = (mlxdist_handle *)operation;
  if (!status) status = alone ? run_alone(operation) : start(operation);
  if (handle && !status) return MLXDIST_OK;
  if (handle) *handle = 0;
  if (!status) status = outcome(operation);
  operation_free(operation);
  return status;
}

int mlxdist_handle_done(mlxdist_handle *handle) {
  return atomic_load_explicit(&((struct operation *)handle)->ended, memory_order_acquire);
}

int mlxdist_handle_wait(mlxdist_handle *handle, double timeout) {
  struct operation *operation = (struct operation *)handle;
  if (!mlxdist_handle_done(handle)) {
    engine_lock(operation->group->engine);
    wait_for(operation, timeout > 0 ? clock_ns() + (uint64_t)(timeout * 1e9) : 0);
    engine_unlock(operation->group->engine);
  }
  if (mlxdist_handle_done(handle)) return outcome(operation);
  return fail(MLXDIST_TIMEOUT, "the operation has not ended after %g s; it goes on", timeout);
}

void mlxdist_handle_free(mlxdist_handle *handle) {
  if (handle) drop((struct operation *)handle);
}
