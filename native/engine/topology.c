#include "topology.h"

#include "error.h"

#include <stdlib.h>
#include <string.h>

/* A ring through given links is hard to find in general, and easy in what people build: a ring, or nearly all pairs. */
#define MAX_STEPS 1000000

int topology_check(const uint8_t *adjacency, int32_t size) {
  for (int32_t a = 0; a < size; a++)
    for (int32_t b = 0; b < a; b++)
      if (!adjacency[a * size + b] != !adjacency[b * size + a])
        return fail(MLXDIST_INVALID_ARGUMENT, "the cable between ranks %d and %d is known to one of them only", b, a);
  return MLXDIST_OK;
}

void *topology_copy(const void *of_ranks, size_t bytes, int *status) {
  if (!of_ranks || *status) return 0;
  void *copy = malloc(bytes);
  if (copy)
    memcpy(copy, of_ranks, bytes);
  else
    *status = fail(MLXDIST_RESOURCES, "out of memory for the topology: %zu bytes", bytes);
  return copy;
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

static int32_t host_of(const mlxdist_group *group, int32_t member) {
  return group->engine->hosts[group->members[member]];
}

/* Lists the members of `member`'s host, in their order, and returns how many they are. */
static int32_t list_host(const mlxdist_group *group, int32_t member, int32_t *list) {
  int32_t count = 0;
  for (int32_t other = 0; other < group->size; other++)
    if (host_of(group, other) == host_of(group, member)) list[count++] = other;
  return count;
}

static int32_t count_hosts(const mlxdist_group *group) {
  int32_t hosts = 0;
  for (int32_t member = 0; member < group->size; member++) {
    int32_t first = 0; /* of its host */
    while (host_of(group, first) != host_of(group, member)) first++;
    hosts += first == member;
  }
  return hosts;
}

/* Hosts in the order of their first members, which is the same on every rank. */
static void divide_by_host(mlxdist_group *group) {
  int32_t list[MLXDIST_MAX_RANKS], listed = 0, place = 0;
  int32_t here = list_host(group, 0, list); /* of each host, if all have as many */
  if (here < 2 || here == group->size || group->size % here) return;
  int32_t *by_host = calloc((size_t)group->size, sizeof *by_host);
  for (int32_t member = 0; by_host && member < group->size; member++) {
    int32_t count = list_host(group, member, list);
    if (count != here) {
      free(by_host);
      return;
    }
    if (list[0] != member) continue;
    memcpy(by_host + listed, list, (size_t)count * sizeof *list);
    listed += count;
  }
  if (!by_host) return;
  while (by_host[place] != group->rank) place++;
  group->by_host = by_host;
  group->of_host = (struct subset){by_host + place - place % here, 1, here, place % here};
  group->across_hosts = (struct subset){by_host + place % here, here, group->size / here, place / here};
}

int32_t mlxdist_group_hosts(const mlxdist_group *group) { return group->hosts; }

void topology_of_group(mlxdist_group *group) {
  bool used[MLXDIST_MAX_RANKS] = {true};
  int steps = 0;
  group->everyone = (struct subset){0, 1, group->size, group->rank};
  group->hosts = group->engine->hosts ? count_hosts(group) : 1;
  if (group->hosts > 1) divide_by_host(group);
  group->fully_connected = true;
  for (int32_t a = 0; a < group->size; a++)
    for (int32_t b = 0; b < a; b++) group->fully_connected &= joined(group, a, b);
  group->ring = calloc((size_t)group->size, sizeof *group->ring); /* begins with member 0 */
  if (group->ring && complete(group, group->ring, used, 1, &steps)) return;
  free(group->ring);
  group->ring = 0;
}
