#include "engine.h"

#include "cable.h"
#include "links.h"
#include "matching.h"
#include "operation.h"
#include "region.h"
#include "repair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_BATCH 16

/* Another thread gets the lock within this time, or sleeps too deeply to wait for it. */
#define YIELD_LIMIT_NS 1000000u

#define LOCK_PATIENCE_NS 1000000000u
#define LOCK_NAP_NS 1000000

int engine_open(struct engine *engine, const mlxdist_link *links) {
  int status = links_open(engine, links);
  bool all = (uint32_t)engine->size <= engine->options.connect_at_start;
  for (int32_t rank = 0; rank < engine->size && all && !status; rank++)
    if (engine->peers[rank].link_count) status = peer_create(&engine->peers[rank], engine);
  return status;
}

void engine_close(struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size; rank++) peer_destroy_channels(&engine->peers[rank]);
  region_free_all(engine);
  for (int32_t rank = 0; rank < engine->size; rank++) peer_free_memory(&engine->peers[rank]);
  links_close(engine);
}

void engine_lock(struct engine *engine) {
  if (pthread_mutex_trylock(&engine->lock) == 0) return;
  atomic_fetch_add(&engine->contenders, 1);
  pthread_mutex_lock(&engine->lock);
  atomic_fetch_sub(&engine->contenders, 1);
}

bool engine_lock_soon(struct engine *engine) {
  uint64_t begun = clock_ns();
  while (pthread_mutex_trylock(&engine->lock)) {
    if (clock_ns() - begun > LOCK_PATIENCE_NS) return false;
    nanosleep(&(struct timespec){0, LOCK_NAP_NS}, 0);
  }
  return true;
}

void engine_unlock(struct engine *engine) { pthread_mutex_unlock(&engine->lock); }

/* A mutex is not fair: without this a thread that takes turn after turn would keep all others out. */
void engine_yield(struct engine *engine) {
  if (atomic_load_explicit(&engine->contenders, memory_order_relaxed) == 0) return;
  engine_unlock(engine);
  uint64_t begin = clock_ns();
  while (atomic_load(&engine->contenders) > 0 && clock_ns() - begin < YIELD_LIMIT_NS) thread_yield();
  engine_lock(engine);
}

mlxdist_group *engine_group(const struct engine *engine, uint16_t id) {
  uint32_t index = id & ~GROUP_HIDDEN;
  mlxdist_group *group = index < engine->groups_room ? engine->groups[index] : 0;
  return group && id & GROUP_HIDDEN ? group->hidden : group;
}

int engine_add_group(struct engine *engine, mlxdist_group *group) {
  if (group->id >= engine->groups_room) {
    uint32_t room = engine->groups_room ? engine->groups_room : 8;
    while (room <= group->id) room *= 2;
    mlxdist_group **grown = realloc(engine->groups, room * sizeof *grown);
    if (!grown) return fail(MLXDIST_RESOURCES, "out of memory for a group");
    memset(grown + engine->groups_room, 0, (room - engine->groups_room) * sizeof *grown);
    engine->groups = grown;
    engine->groups_room = room;
  }
  engine->groups[group->id] = group;
  return MLXDIST_OK;
}

static int take_completion(struct engine *engine, const struct ibv_wc *wc) {
  bool send = wc->wr_id >> 63;
  int32_t rank = (int32_t)(wc->wr_id >> 32 & 0xffff);
  uint32_t index = (uint32_t)(wc->wr_id >> 48 & (WIRE_CHANNELS - 1)), number = (uint32_t)wc->wr_id;
  struct peer *peer = &engine->peers[rank];
  struct channel *channel = &peer->channels[index];
  if ((wc->wr_id >> 50 & ENGINE_EPOCHS) != (channel->epoch & ENGINE_EPOCHS)) return MLXDIST_OK; /* of an earlier one */
  if (wc->status != IBV_WC_SUCCESS) return repair_begin(channel, wc->status);
  if (send) {
    channel_on_sent(channel, number);
    return MLXDIST_OK;
  }
  struct arrival *arrival = 0;
  int status = channel_on_received(channel, number, wc->byte_len, &arrival);
  return status || !arrival ? status : matching_deliver(peer, arrival);
}

static int poll(struct engine *engine, struct device *device, bool *moved) {
  struct ibv_wc completions[POLL_BATCH];
  int n = ibv_poll_cq(device->cq, POLL_BATCH, completions);
  count(&engine->counters.poll_cq_calls, 1);
  if (n < 0) return fail(MLXDIST_TRANSPORT, "poll_cq of rank %d failed", engine->rank);
  for (int i = 0; i < n; i++) {
    int status = take_completion(engine, &completions[i]);
    if (status) return status;
  }
  if (n > 0) *moved = true;
  return MLXDIST_OK;
}

static int acknowledge(struct engine *engine, bool lazily) {
  for (int32_t rank = 0; rank < engine->size; rank++) {
    if (!engine->peers[rank].usable) continue;
    struct peer *peer = &engine->peers[rank];
    int status = peer->dead_links ? cable_move_messages(peer) : MLXDIST_OK;
    if (!status) status = peer_acknowledge(peer, lazily);
    if (status) return status;
  }
  return MLXDIST_OK;
}

static int step_all(struct engine *engine, bool *moved, struct operation **failed) {
  struct operation *next;
  for (struct operation *operation = engine->active; operation; operation = next) {
    next = operation->next;
    int status = operation_step(operation, moved);
    *failed = operation;
    if (status) return status;
  }
  return MLXDIST_OK;
}

static void end_all(struct engine *engine) {
  engine->ended = true;
  while (engine->active) operation_end(engine->active, failure_check(&engine->failure));
}

void engine_turn(struct engine *engine, bool *moved) {
  struct operation *failed = 0;
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < engine->device_count && !status; i++) status = poll(engine, &engine->devices[i], moved);
  if (!status) status = step_all(engine, moved, &failed);
  if (!status) failed = 0;
  if (!status) status = acknowledge(engine, *moved);
  if (status) {
    engine_fail(engine, failed, status);
    *moved = true;
  }
  if (atomic_load_explicit(&engine->failure.status, memory_order_acquire) == MLXDIST_OK || engine->ended) return;
  /* What failed elsewhere does not matter to an operation that has all it needs. */
  step_all(engine, moved, &failed);
  end_all(engine);
  *moved = true;
}

void engine_wait(struct engine *engine, struct waiting *wait) {
  bool moved = false;
  engine_turn(engine, &moved);
  if (moved) return;
  engine_unlock(engine);
  uint64_t now = wait_turn(wait);
  engine_lock(engine);
  engine_look_at_timers(engine, now);
}

bool engine_is_settled(const struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (engine->peers[rank].usable && !peer_is_settled(&engine->peers[rank])) return false;
  return true;
}

/* The last stream to `peer` before those of `operation`: all up to there is well. */
static uint32_t last_good_stream(const struct operation *operation, const struct peer *peer) {
  for (int i = 0; i < operation->out.count; i++)
    if (operation->out.list[i].lane->peer == peer) return operation->out.list[i].number - 1;
  return operation->group->lanes[operation->group->member_of[peer->rank]].sent;
}

/* A peer that cannot be told this way learns it from the side channel. */
static void send_abort(struct peer *peer, const struct operation *operation, const char *message, uint32_t length) {
  struct channel *eager = peer_eager(peer);
  if (!peer->usable || !channel_can_send(eager, WIRE_ABORT)) return;
  const mlxdist_group *world = engine_group(eager->engine, 0);
  struct outgoing_message abort = {
      .kind = WIRE_ABORT, .stream = world->lanes[peer->rank].sent, .payload = message, .length = length};
  if (operation && operation->group->member_of[peer->rank] >= 0) {
    abort.group = operation->group->id;
    abort.stream = last_good_stream(operation, peer);
  }
  (void)channel_send(eager, &abort);
}

/* Every error says where it happened. */
static void locate(const struct engine *engine, const struct operation *operation) {
  char text[ERROR_TEXT_BYTES], where[ERROR_TEXT_BYTES / 2], name[192];
  snprintf(where, sizeof where, "rank %d on %s", engine->rank, engine->host);
  if (operation) {
    layout_name(&operation->receives, operation->sequence, name, sizeof name);
    snprintf(where, sizeof where, "rank %d on %s in %s", engine->rank, engine->host, name);
  }
  snprintf(text, sizeof text, "%.*s", (int)(sizeof text - strlen(where) - 4), mlxdist_last_error());
  fail(MLXDIST_OK, "%s [%s]", text, where);
}

void engine_fail(struct engine *engine, const struct operation *operation, int status) {
  locate(engine, operation);
  char message[sizeof(struct wire_abort) + ERROR_TEXT_BYTES];
  struct wire_abort abort = {.status = status};
  memcpy(message, &abort, sizeof abort);
  const char *text = mlxdist_last_error();
  size_t length = strnlen(text, ERROR_TEXT_BYTES);
  memcpy(message + sizeof abort, text, length);
  if (failure_set(&engine->failure, status, text))
    for (int32_t rank = 0; rank < engine->size; rank++)
      send_abort(&engine->peers[rank], operation, message, (uint32_t)(sizeof abort + length));
  end_all(engine);
}
