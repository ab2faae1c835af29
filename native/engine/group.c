#include "group.h"

#include "error.h"
#include "label.h"
#include "operation.h"
#include "topology.h"

#include <stdlib.h>

void group_free(mlxdist_group *group) {
  if (!group) return;
  group_free(group->internal);
  operation_destroy(atomic_load(&group->spare));
  for (int32_t member = 0; member < group->size && group->peers; member++) {
    places_free(&group->peers[member].sends);
    places_free(&group->peers[member].receives);
  }
  places_free(&group->collectives);
  label_forget_threads(group);
  free(group->peers);
  free(group->members);
  free(group->member_of);
  free(group->ring);
  free(group->by_host);
  free(group);
}

static mlxdist_group *allocate(struct engine *engine, uint16_t id, const int32_t *members, int32_t size) {
  mlxdist_group *group = calloc(1, sizeof *group);
  if (!group) return 0;
  *group = (mlxdist_group){.engine = engine,
                           .id = id,
                           .timeout = -1,
                           .size = size,
                           .peers = calloc((size_t)size, sizeof *group->peers),
                           .members = calloc((size_t)size, sizeof *group->members),
                           .member_of = calloc((size_t)engine->size, sizeof *group->member_of)};
  if (!group->peers || !group->members || !group->member_of) {
    group_free(group);
    return 0;
  }
  group->counters = &group->own_counters;
  places_init(&group->collectives);
  for (int32_t rank = 0; rank < engine->size; rank++) group->member_of[rank] = -1;
  for (int32_t member = 0; member < size; member++) {
    int32_t rank = members[member];
    struct group_peer *group_peer = &group->peers[member];
    group_peer->peer = rank == engine->rank ? 0 : &engine->peers[rank];
    places_init(&group_peer->sends);
    places_init(&group_peer->receives);
    if (rank == engine->rank) group->rank = member;
    group->members[member] = rank;
    group->member_of[rank] = member;
  }
  topology_of_group(group);
  return group;
}

int group_new(struct engine *engine, uint16_t id, const int32_t *members, int32_t size, mlxdist_group **result) {
  mlxdist_group *group = allocate(engine, id, members, size);
  if (group) group->internal = allocate(engine, id | GROUP_INTERNAL, members, size);
  if (!group || !group->internal) {
    group_free(group);
    return fail(MLXDIST_RESOURCES, "out of memory for a group");
  }
  engine_lock(engine);
  int status = engine_add_group(engine, group);
  engine_unlock(engine);
  if (status)
    group_free(group);
  else
    *result = group;
  return status;
}

int32_t mlxdist_group_rank(mlxdist_group *group) { return group->rank; }
int32_t mlxdist_group_size(mlxdist_group *group) { return group->size; }
int32_t mlxdist_group_id(mlxdist_group *group) { return group->id; }
mlxdist_group *mlxdist_group_stream_lane(mlxdist_group *world) { return world->engine->stream_lane; }
