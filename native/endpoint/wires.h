/*
 * Wires: which ranks are joined by a cable, where not all are.
 *
 * A few Macs are often wired as a ring, because each has few ports. Then only neighbours can talk to each other, and
 * the order of the ring is that of the cables, whatever the numbers of the ranks.
 */
#ifndef MLXDIST_ENDPOINT_WIRES_H
#define MLXDIST_ENDPOINT_WIRES_H

#include "group.h"

/* Copies the caller's matrix. INVALID_ARGUMENT if it is not symmetric. */
int wires_copy(struct engine* engine, const uint8_t* wires);

/* Sets the group's `ring` and `fully_wired`. */
void wires_follow(mlxdist_group* group);

#endif
