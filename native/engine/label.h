/*
 * Labels: which operation of the program this is.
 *
 * Ranks that call operations with the same dtype and shape in another order would take them for each other. A label
 * tells them apart: a hash of a text such as "model.layers.3.self_attn #2 backward", and the number of the thread
 * that has called the operation. It travels with the first message of each transfer. Two that are known and differ are
 * a MISMATCH; 0 is unknown and matches all, as for MLX's own operations. Lines of the program are no labels: programs
 * may call one collective in different lines, as where the root differs from the others.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mlxdist_group;

#define LABEL_THREAD_SHIFT 56
#define LABEL_MAX_THREAD 255 /* later threads share this number */
#define LABEL_TEXT_MASK ((UINT64_C(1) << LABEL_THREAD_SHIFT) - 1)

/* Whether both name the same operation, as far as they are known. */
static inline bool label_part_matches(uint64_t a, uint64_t b) { return !a || !b || a == b; }
static inline bool label_matches(uint64_t a, uint64_t b) {
  return a == b || (label_part_matches(a & LABEL_TEXT_MASK, b & LABEL_TEXT_MASK) &&
                    label_part_matches(a >> LABEL_THREAD_SHIFT, b >> LABEL_THREAD_SHIFT));
}

/* The label of the collective in that place, which this thread calls: `text` (mlxdist_label), and once collectives
 * of two threads have been in progress at a time, the thread's number in the order of first use. Threads that wait for
 * each other between their operations may be others on each rank. */
uint64_t label_with_thread(struct mlxdist_group* group, uint64_t text, uint64_t place);

/* When the group ends. */
void label_forget_threads(struct mlxdist_group* group);

/* " in model.layers.3.self_attn #2", " from thread 2 of the group", or "". */
void label_describe(uint64_t label, char* text, size_t bytes);
