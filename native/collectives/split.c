#include "direct.h"
#include "ring.h"
#include "start.h"

#include <stdlib.h>

/* What every rank of the parent says. */
struct split_request {
  int32_t color, key;
  int32_t next_id; /* the lowest that it has not used */
  int32_t reserved;
};

/* On the internal group beside the parent, so that it does not mix with operations that are in progress there. */
static int exchange_requests(mlxdist_group *parent, const struct split_request *own, struct split_request *all,
                             mlxdist_call *call) {
  struct operation *operation;
  struct wire_descriptor descriptor = layout_describe(WIRE_SPLIT, 0, 0, -1, MLXDIST_DIRECT);
  int status = parent->fully_connected ? MLXDIST_OK : check_ring(parent, "split");
  if (!status) status = operation_new(parent->internal, &descriptor, &operation);
  if (status) return status;
  struct chunks chunks = {.count = sizeof *own * (uint64_t)parent->size, .element_bytes = 1, .size = parent->size};
  if (parent->fully_connected) {
    direct_all_gather(operation, &chunks, (const char *)own, (char *)all);
  } else {
    ring_all_gather(operation, &chunks, (const char *)own, (char *)all);
  }
  return operation_start(operation, call);
}

/* The ranks of the parent with this color, by key, then by rank. */
static int32_t choose_members(const mlxdist_group *parent, const struct split_request *requests, int32_t color,
                              int32_t *chosen) {
  int32_t size = 0;
  for (int32_t rank = 0; rank < parent->size; rank++) {
    if (requests[rank].color != color) continue;
    int32_t place = size++;
    for (; place > 0 && requests[chosen[place - 1]].key > requests[rank].key; place--)
      chosen[place] = chosen[place - 1];
    chosen[place] = rank;
  }
  for (int32_t place = 0; place < size; place++) chosen[place] = parent->members[chosen[place]];
  return size;
}

int mlxdist_group_split(mlxdist_group *group, int32_t color, int32_t key, mlxdist_call *call, mlxdist_group **result) {
  struct split_request requests[MLXDIST_MAX_RANKS];
  struct split_request own = {.color = color < 0 ? -1 : color, .key = key, .next_id = group->engine->next_group_id};
  *result = 0;
  int status = exchange_requests(group, &own, requests, call);
  if (status) return status;
  /* One number for all colors: groups with no rank in common may share it. */
  int32_t id = 0;
  for (int32_t rank = 0; rank < group->size; rank++)
    if (requests[rank].next_id > id) id = requests[rank].next_id;
  if (id > (int32_t)GROUP_MAX_ID)
    return fail(MLXDIST_RESOURCES,
                "split: the ranks have split %u times, which is as often as they can until the "
                "processes end: make the groups once and keep them, not at every step",
                GROUP_MAX_ID);
  engine_use_group_id(group->engine, id);
  if (color < 0) return MLXDIST_OK;
  int32_t members[MLXDIST_MAX_RANKS];
  int32_t size = choose_members(group, requests, color, members);
  return group_new(group->engine, (uint16_t)id, members, size, result);
}
