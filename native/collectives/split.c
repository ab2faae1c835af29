#include "direct.h"
#include "ring.h"
#include "start.h"

#include <stdlib.h>

/* What every rank of the parent says. */
struct split_request {
  int32_t color, key;
  int32_t next_id; /* higher than all that it has used */
  int32_t has_id;  /* it has taken the id that all have chosen before this */
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
    direct_all_gather(operation, &parent->everyone, &chunks, (const char *)own, (char *)all);
  } else {
    ring_all_gather(operation, &chunks, (const char *)own, (char *)all);
  }
  return operation_start(operation, call);
}

/* One number for all colors: groups with no rank in common may share it. Where another group is split at the same time
 * the two may choose the same, the one first here and the other elsewhere, and have to choose again: after some
 * attempts from numbers that end like the parent's, which no other parent of a common rank shares. */
static int32_t choose_id(const mlxdist_group *parent, const struct split_request *requests, int attempt) {
  int32_t id = 0;
  for (int32_t rank = 0; rank < parent->size; rank++)
    if (requests[rank].next_id > id) id = requests[rank].next_id;
  return id + ((parent->id - id) & ((1 << (attempt < 15 ? attempt : 15)) - 1));
}

static bool all_have_id(const mlxdist_group *parent, const struct split_request *requests) {
  for (int32_t rank = 0; rank < parent->size; rank++)
    if (!requests[rank].has_id) return false;
  return true;
}

/* Leaves in `requests` what all ranks have said, and in `id` a number that on no rank a group has had. */
static int agree(mlxdist_group *parent, struct split_request *own, struct split_request *requests, mlxdist_call *call,
                 int32_t *id) {
  mlxdist_call later = call ? *call : (mlxdist_call){.timeout = -1};
  later.place = 0; /* that is of the first exchange */
  int status = exchange_requests(parent, own, requests, call);
  for (int attempt = 0; !status; attempt++) {
    *id = choose_id(parent, requests, attempt);
    if (*id > (int32_t)GROUP_MAX_ID)
      return fail(MLXDIST_RESOURCES,
                  "split: the ranks have split %u times, which is as often as they can until the "
                  "processes end: make the groups once and keep them, not at every step",
                  GROUP_MAX_ID);
    own->has_id = engine_take_group_id(parent->engine, *id);
    own->next_id = engine_next_group_id(parent->engine);
    status = exchange_requests(parent, own, requests, &later);
    if (!status && all_have_id(parent, requests)) return MLXDIST_OK;
  }
  return status;
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
  struct split_request own = {
      .color = color < 0 ? -1 : color, .key = key, .next_id = engine_next_group_id(group->engine)};
  *result = 0;
  int32_t id;
  int status = agree(group, &own, requests, call, &id);
  if (status || color < 0) return status;
  int32_t members[MLXDIST_MAX_RANKS];
  int32_t size = choose_members(group, requests, color, members);
  return group_new(group->engine, (uint16_t)id, members, size, result);
}
