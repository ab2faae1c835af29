/*
 * Topology: which ranks a link joins, where it does not join all.
 *
 * A few Macs are often wired as a ring, because each has few ports. Then only neighbors exchange messages, and
 * the order of the ring is that of the cables, whatever the numbers of the ranks.
 */
#pragma once

#include "group.h"

/* Copies the caller's matrix. INVALID_ARGUMENT if it is not symmetric. */
int topology_copy(const uint8_t* adjacency, int32_t size, uint8_t** copy);

int topology_copy_hosts(const int32_t* hosts, int32_t size, int32_t** copy);

/* Sets the group's `ring`, `fully_connected`, `by_host` and subsets. */
void topology_of_group(mlxdist_group* group);
