#include "algorithm.h"

#include "layout.h"

#include <stdbool.h>

/* Up to here the number of messages counts, above it the number of bytes. */
#define SMALL_BYTES (32u << 10)

#define HAS(algorithm) (1u << MLXDIST_##algorithm)

static const uint32_t algorithms[] = {
    [MLXDIST_ALL_REDUCE] =
        HAS(DIRECT) | HAS(MESH) | HAS(RING) | HAS(RECURSIVE_DOUBLING) | HAS(TREE) | HAS(HIERARCHICAL),
    [MLXDIST_ALL_GATHER] = HAS(DIRECT) | HAS(RING) | HAS(HIERARCHICAL),
    [MLXDIST_REDUCE_SCATTER] = HAS(DIRECT) | HAS(RING) | HAS(HIERARCHICAL),
    [MLXDIST_BROADCAST] = HAS(DIRECT) | HAS(MESH) | HAS(RING) | HAS(TREE),
    [MLXDIST_BARRIER] = HAS(DIRECT) | HAS(RING) | HAS(RECURSIVE_DOUBLING),
    [MLXDIST_REDUCE] = HAS(DIRECT) | HAS(MESH) | HAS(RING) | HAS(TREE),
    [MLXDIST_GATHER] = HAS(DIRECT) | HAS(RING),
    [MLXDIST_SCATTER] = HAS(DIRECT) | HAS(RING),
    [MLXDIST_ALL_TO_ALL] = HAS(DIRECT) | HAS(HIERARCHICAL),
};
#define OPERATIONS ((int32_t)(sizeof algorithms / sizeof *algorithms))

static inline bool has(const mlxdist_group *group, int32_t operation, int32_t algorithm) {
  if (algorithm == MLXDIST_HIERARCHICAL && !group->by_host) return false;
  return algorithm > MLXDIST_AUTO && algorithm <= MLXDIST_HIERARCHICAL && (algorithms[operation] >> algorithm & 1);
}

/* Where ranks share cores, messages take time one after the other: their number counts then, not that of the steps. Up
 * to three ranks it would save no more than two. */
#define CROWDED_TREE_RANKS 4

/* A world that does not connect every pair at the start keeps to few peers: each costs memory. */
static enum mlxdist_algorithm by_default(const mlxdist_group *group, int32_t operation, uint64_t bytes) {
  bool small = bytes <= SMALL_BYTES;
  bool sparse = (uint32_t)group->size > group->engine->options.on_demand_threshold;
  /* An all_to_all has as many bytes for other hosts in fewer messages, the others have fewer bytes in more steps. */
  bool better = small == (operation == MLXDIST_ALL_TO_ALL);
  if (better && has(group, operation, MLXDIST_HIERARCHICAL)) return MLXDIST_HIERARCHICAL;
  switch (operation) {
    case MLXDIST_ALL_REDUCE:
      /* For two ranks direct moves as few bytes as any other. */
      if (sparse) return small ? MLXDIST_RECURSIVE_DOUBLING : MLXDIST_RING;
      if (group->engine->crowded && group->size >= CROWDED_TREE_RANKS && small) return MLXDIST_TREE;
      return group->size == 2 || small ? MLXDIST_DIRECT : MLXDIST_MESH;
    case MLXDIST_ALL_GATHER:
    case MLXDIST_REDUCE_SCATTER: return sparse ? MLXDIST_RING : MLXDIST_DIRECT;
    case MLXDIST_BROADCAST:
      if (sparse) return small ? MLXDIST_TREE : MLXDIST_RING;
      return group->size > 2 && !small ? MLXDIST_MESH : MLXDIST_DIRECT;
    case MLXDIST_GATHER:
    case MLXDIST_SCATTER:
    case MLXDIST_ALL_TO_ALL: return MLXDIST_DIRECT;
    case MLXDIST_BARRIER: return sparse ? MLXDIST_RECURSIVE_DOUBLING : MLXDIST_DIRECT;
    default: return sparse ? MLXDIST_TREE : group->size == 2 || small ? MLXDIST_DIRECT : MLXDIST_MESH;
  }
}

enum mlxdist_algorithm choose(const mlxdist_group *group, enum mlxdist_operation operation,
                              const mlxdist_layout *layout) {
  const struct engine *engine = group->engine;
  uint64_t bytes = layout ? layout_bytes(layout) : 0;
  if (group->size == 1) return MLXDIST_DIRECT;
  /* The only one that keeps to the links that there are. AUTO: the operation cannot be carried out. */
  if (!group->fully_connected) return has(group, operation, MLXDIST_RING) ? MLXDIST_RING : MLXDIST_AUTO;
  if (has(group, operation, engine->options.algo)) return engine->options.algo;
  for (uint64_t i = 0; i < engine->tuning_lines; i++) {
    const mlxdist_tuning *line = &engine->tuning[i];
    if (line->operation == (int32_t)operation && line->ranks == group->size && line->hosts == group->hosts &&
        bytes <= line->bytes) {
      if (has(group, operation, line->algorithm)) return line->algorithm;
      break; /* it was measured in a hierarchy, which these have not, of as many ranks on as many hosts */
    }
  }
  return by_default(group, operation, bytes);
}

int32_t mlxdist_group_algorithm(mlxdist_group *group, int32_t operation, const mlxdist_layout *layout) {
  if (operation <= 0 || operation >= OPERATIONS || layout_check("mlxdist_group_algorithm", layout)) return MLXDIST_AUTO;
  return choose(group, operation, layout);
}
