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

/* Sets the group's `ring` and `fully_connected`. */
void topology_of_group(mlxdist_group* group);
