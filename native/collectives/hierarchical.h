/*
 * The hierarchy: within each host, then between hosts, each time direct.
 *
 * Links between hosts are slower than those within one. Here L ranks of a host share them: of an all_reduce of S bytes
 * over H hosts each rank sends 2 (H-1)/H S/L bytes to other hosts, where the mesh sends L times as many. A sum is
 * rounded once a host, in the order of ranks, and once more, in the order of hosts.
 *
 * An all_to_all sends as many bytes to other hosts as direct, in 1/L of the messages: one a pair of hosts and place.
 */
#pragma once

#include "chunks.h"

void hierarchical_all_reduce(struct operation* operation, const struct reduction* reduction, const char* in, char* out);

void hierarchical_reduce_scatter(struct operation* operation, const struct reduction* reduction, const char* in,
                                 char* out);

void hierarchical_all_gather(struct operation* operation, const struct chunks* chunks, const char* own, char* out);

/* Chunks of `bytes` bytes. Every byte crosses this host, too: for few bytes only. */
void hierarchical_all_to_all(struct operation* operation, uint64_t bytes, const char* in, char* out);
