#include "engine.h"

#include "error.h"
#include "group.h"
#include "steady_clock.h"
#include "thread.h"
#include "topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Another thread gets the lock within this time, or sleeps too deeply to wait for it. */
#define YIELD_LIMIT_NS 1000000u

#define LOCK_LIMIT_NS 1000000000u
#define LOCK_NAP_NS 1000000

static void read_host(struct engine *engine) {
  if (engine->options.host)
    snprintf(engine->host, sizeof engine->host, "%s", engine->options.host);
  else if (gethostname(engine->host, sizeof engine->host - 1))
    snprintf(engine->host, sizeof engine->host, "localhost");
}

static void init_transport(struct engine *engine, const struct transport_callbacks *callbacks) {
  engine->transport = (struct transport){.rank = engine->rank,
                                         .size = engine->size,
                                         .host = engine->host,
                                         .options = &engine->options,
                                         .counters = &engine->transport_counters,
                                         .callbacks = callbacks,
                                         .endpoints = calloc((size_t)engine->size, sizeof(struct endpoint *))};
}

static int allocate_peers(struct engine *engine) {
  engine->peers = calloc((size_t)engine->size, sizeof *engine->peers);
  if (!engine->peers || !engine->transport.endpoints)
    return fail(MLXDIST_RESOURCES, "out of memory for %d ranks", engine->size);
  for (int32_t rank = 0; rank < engine->size; rank++) {
    struct peer *peer = &engine->peers[rank];
    engine->transport.endpoints[rank] = &peer->endpoint;
    peer->endpoint.transport = &engine->transport;
    peer->endpoint.rank = rank;
    peer->engine = engine;
    meeting_init(&peer->meeting);
  }
  return MLXDIST_OK;
}

static int open_transport(struct engine *engine, const mlxdist_link *links) {
  bool reachable[MLXDIST_MAX_RANKS], all = (uint32_t)engine->size <= engine->options.on_demand_threshold;
  for (int32_t rank = 0; rank < engine->size; rank++) reachable[rank] = engine_is_adjacent(engine, engine->rank, rank);
  int status = transport_open(&engine->transport, links, reachable);
  for (int32_t rank = 0; rank < engine->size && all && !status; rank++)
    if (engine->peers[rank].endpoint.link_count) status = endpoint_create(&engine->peers[rank].endpoint);
  return status;
}

int engine_new(int32_t rank, int32_t size, const mlxdist_options *options, const struct transport_callbacks *callbacks,
               struct engine **result) {
  struct engine *engine = calloc(1, sizeof *engine);
  if (!engine) return fail(MLXDIST_RESOURCES, "out of memory for %d ranks", size);
  engine->rank = rank;
  engine->size = size;
  engine->options = *options;
  engine->one_host = !options->links;
  engine->next_group_id = 1;
  read_host(engine);
  engine->options.host = 0; /* the caller's, as those below are */
  engine->options.links = 0;
  engine->options.adjacency = 0;
  engine->options.hosts = 0;
  pthread_mutex_init(&engine->lock, 0);
  pthread_mutex_init(&engine->progress_lock, 0);
  pthread_cond_init(&engine->progress_wanted, 0);
  failure_init(&engine->failure);
  init_transport(engine, callbacks);
  int status = allocate_peers(engine);
  if (!status && options->adjacency) status = topology_check(options->adjacency, size);
  engine->adjacency = topology_copy(options->adjacency, (size_t)size * (size_t)size, &status);
  engine->hosts = topology_copy(options->hosts, (size_t)size * sizeof *engine->hosts, &status);
  if (!status && size > 1) status = open_transport(engine, options->links);
  if (status)
    engine_free(engine);
  else
    *result = engine;
  return status;
}

static void free_unexpected(struct peer *peer) {
  while (peer->unexpected) {
    struct recv_desc *desc = peer->unexpected;
    peer->unexpected = desc->next;
    if (desc->on_heap) free(desc);
  }
}

void engine_free(struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size && engine->peers; rank++) free_unexpected(&engine->peers[rank]);
  if (engine->peers && engine->transport.endpoints) transport_close(&engine->transport);
  free(engine->transport.endpoints);
  free(engine->peers);
  free(engine->groups);
  free(engine->tuning);
  free(engine->adjacency);
  free(engine->hosts);
  failure_destroy(&engine->failure);
  pthread_cond_destroy(&engine->progress_wanted);
  pthread_mutex_destroy(&engine->progress_lock);
  pthread_mutex_destroy(&engine->lock);
  free(engine);
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
    if (clock_ns() - begun > LOCK_LIMIT_NS) return false;
    nanosleep(&(struct timespec){0, LOCK_NAP_NS}, 0);
  }
  return true;
}

void engine_let_in(struct engine *engine) {
  engine_unlock(engine);
  uint64_t begin = clock_ns();
  while (atomic_load(&engine->contenders) > 0 && clock_ns() - begin < YIELD_LIMIT_NS) thread_yield();
  engine_lock(engine);
}

int engine_add_group(struct engine *engine, mlxdist_group *group) {
  if (group->id == GROUP_STREAM_LANE) {
    engine->stream_lane = group;
    return MLXDIST_OK;
  }
  if (group->id >= engine->groups_capacity) {
    uint32_t capacity = engine->groups_capacity ? engine->groups_capacity : 8;
    while (capacity <= group->id) capacity *= 2;
    mlxdist_group **grown = realloc(engine->groups, capacity * sizeof *grown);
    if (!grown) return fail(MLXDIST_RESOURCES, "out of memory for a group");
    memset(grown + engine->groups_capacity, 0, (capacity - engine->groups_capacity) * sizeof *grown);
    engine->groups = grown;
    engine->groups_capacity = capacity;
  }
  if (engine->groups[group->id])
    return fail(MLXDIST_MISMATCH, "rank %d has a group of the number %d already", engine->rank, group->id);
  engine->groups[group->id] = group;
  return MLXDIST_OK;
}

void engine_remove_group(struct engine *engine, const mlxdist_group *group) {
  engine_lock(engine);
  engine->groups[group->id] = 0;
  engine_unlock(engine);
}

int32_t engine_next_group_id(struct engine *engine) {
  engine_lock(engine);
  int32_t id = engine->next_group_id;
  engine_unlock(engine);
  return id;
}

bool engine_take_group_id(struct engine *engine, int32_t id) {
  uint8_t bit = (uint8_t)(1u << id % 8);
  engine_lock(engine);
  bool taken = engine->used_group_ids[id / 8] & bit;
  engine->used_group_ids[id / 8] |= bit;
  if (id >= engine->next_group_id) engine->next_group_id = id + 1;
  engine_unlock(engine);
  return !taken;
}

void engine_finalize(struct engine *engine) {
  transport_stop_keepalive(&engine->transport);
  engine->finalized = true;
}
