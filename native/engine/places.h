/*
 * Places: the order of the operations of a group.
 *
 * Operations of several ranks are matched by their place in an order, and all ranks must have the same order. MLX
 * carries operations out in the threads of its streams, which come to them in any order. So an operation takes its
 * place when it is handed to such a thread (mlxdist_enqueue), by the thread that evaluates the graph, where the order
 * of the program still holds; one that is called directly takes it then. A later place may be issued first: nothing on
 * the wire counts operations, a transfer is named by its place and its index within the operation.
 *
 * Collectives of a group have one order, whether a handle, a stream or a thread waits for them. Messages have one for
 * each pair of ranks and direction, so that a thread may send while another one evaluates.
 *
 * What a program with several threads calls in one group has no order that the engine could know. A lane is a group of
 * the same members with an order of its own; without one, the number of the thread is a part of the label (label.h)
 * once collectives of two threads have overlapped, so that threads that come in another order on another rank are a
 * MISMATCH.
 */
#pragma once

#include "wire.h"

#include <stdatomic.h>
#include <stdbool.h>

struct place_range {
  uint32_t first, last;
};

/* One order: how many places this rank has taken, and which of them it has issued. */
struct places {
  _Atomic uint64_t taken;

  /* With the lock: all up to `issued`, and those in the ranges, which begin further on. There are as many as threads
   * overtake each other. */
  uint32_t issued;
  uint32_t count, capacity;
  struct place_range* ranges;
};

void places_init(struct places* places);
void places_free(struct places* places);

/* The next place, from 1. Any thread. */
static inline uint64_t places_take(struct places* places) { return atomic_fetch_add(&places->taken, 1) + 1; }

/* A place as it travels. */
static inline uint32_t place_on_wire(uint64_t place) { return WIRE_START + (uint32_t)place; }

/* RESOURCES: there is no memory to note it. */
int places_issue_early(struct places* places, uint32_t place);
static inline int places_issue(struct places* places, uint32_t place) {
  if (place != places->issued + 1 || places->count) return places_issue_early(places, place);
  places->issued = place;
  return MLXDIST_OK;
}
bool places_has_issued(const struct places* places, uint32_t place);
