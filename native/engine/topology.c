#include "topology.h"

#include "error.h"

#include <stdlib.h>
#include <string.h>

/* A ring through given links is hard to find in general, and easy in what people build: a ring, or nearly all pairs. */
#define MAX_STEPS 1000000

int topology_copy(const uint8_t *adjacency, int32_t size, uint8_t **copy) {
  for (int32_t a = 0; a < size; a++)
    for (int32_t b = 0; b < a; b++)
      if (!adjacency[a * size + b] != !adjacency[b * size + a])
        return fail(MLXDIST_INVALID_ARGUMENT, "the cable between ranks %d and %d is known to one of them only", b, a);
  *copy = malloc((size_t)size * (size_t)size);
  if (!*copy) return fail(MLXDIST_RESOURCES, "out of memory for the topology of %d ranks", size);
  memcpy(*copy, adjacency, (size_t)size * (size_t)size);
  return MLXDIST_OK;
}

static bool joined(const mlxdist_group *group, int32_t a, int32_t b) {
  return engine_is_adjacent(group->engine, group->members[a], group->members[b]);
}

/* Puts members at `place` and after it, so that each is joined to the one before and the last one to the first. */
static bool complete(const mlxdist_group *group, int32_t *ring, bool *used, int32_t place, int *steps) {
  if (place == group->size) return group->size == 1 || joined(group, ring[place - 1], ring[0]);
  for (int32_t member = 0; member < group->size && ++*steps < MAX_STEPS; member++) {
    if (used[member] || !joined(group, ring[place - 1], member)) continue;
    used[member] = true;
    ring[place] = member;
    if (complete(group, ring, used, place + 1, steps)) return true;
    used[member] = false;
  }
  return false;
}

void topology_of_group(mlxdist_group *group) {
  bool used[MLXDIST_MAX_RANKS] = {true};
  int steps = 0;
  group->fully_connected = true;
  for (int32_t a = 0; a < group->size; a++)
    for (int32_t b = 0; b < a; b++) group->fully_connected &= joined(group, a, b);
  group->ring = calloc((size_t)group->size, sizeof *group->ring); /* begins with member 0 */
  if (group->ring && complete(group, group->ring, used, 1, &steps)) return;
  free(group->ring);
  group->ring = 0;
}
