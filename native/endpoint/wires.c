#include "wires.h"

#include <stdlib.h>
#include <string.h>

/* A ring through given wires is hard to find in general, and easy in what people build: a ring, or nearly all pairs. */
#define MOST_STEPS 1000000

int wires_copy(struct engine *engine, const uint8_t *wires) {
  int32_t size = engine->size;
  for (int32_t a = 0; a < size; a++)
    for (int32_t b = 0; b < a; b++)
      if (!wires[a * size + b] != !wires[b * size + a])
        return fail(MLXDIST_INVALID_ARGUMENT, "the cable between ranks %d and %d is known to one of them only", b, a);
  engine->wires = malloc((size_t)size * (size_t)size);
  if (!engine->wires) return fail(MLXDIST_RESOURCES, "out of memory for the wires of %d ranks", size);
  memcpy(engine->wires, wires, (size_t)size * (size_t)size);
  return MLXDIST_OK;
}

static bool joined(const mlxdist_group *group, int32_t a, int32_t b) {
  return engine_has_wire(group->engine, group->members[a], group->members[b]);
}

/* Puts members at `place` and after it, so that each is joined to the one before and the last one to the first. */
static bool complete(const mlxdist_group *group, int32_t *ring, bool *used, int32_t place, int *steps) {
  if (place == group->size) return group->size == 1 || joined(group, ring[place - 1], ring[0]);
  for (int32_t member = 0; member < group->size && ++*steps < MOST_STEPS; member++) {
    if (used[member] || !joined(group, ring[place - 1], member)) continue;
    used[member] = true;
    ring[place] = member;
    if (complete(group, ring, used, place + 1, steps)) return true;
    used[member] = false;
  }
  return false;
}

void wires_follow(mlxdist_group *group) {
  bool used[GROUP_MAX_RANKS] = {true};
  int steps = 0;
  group->fully_wired = true;
  for (int32_t a = 0; a < group->size; a++)
    for (int32_t b = 0; b < a; b++) group->fully_wired &= joined(group, a, b);
  group->ring = calloc((size_t)group->size, sizeof *group->ring); /* begins with member 0 */
  if (group->ring && complete(group, group->ring, used, 1, &steps)) return;
  free(group->ring);
  group->ring = 0;
}
