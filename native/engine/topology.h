/*
 * Topology: which ranks a link joins, where it does not join all.
 *
 * A few Macs are often wired as a ring, because each has few ports. Then only neighbors exchange messages, and
 * the order of the ring is that of the cables, whatever the numbers of the ranks.
 */
#pragma once

#include "group.h"

/* INVALID_ARGUMENT if the caller's matrix is not symmetric. */
int topology_check(const uint8_t* adjacency, int32_t size);

/* A copy of what the caller says of the ranks; NULL where that is NULL, and where `status` is or becomes an error. */
void* topology_copy(const void* of_ranks, size_t bytes, int* status);

/* Sets the group's `ring`, `fully_connected`, `hosts`, `by_host` and subsets. */
void topology_of_group(mlxdist_group* group);
