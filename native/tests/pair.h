/*
 * Two connected ranks in one thread, each with an engine of its own and without its progress thread: nothing happens
 * but what the program does, turn by turn. For fuzzers, which need the same to happen again, and for counting
 * instructions.
 */
#pragma once

#include "group.h"
#include "progress.h"
#include "progress_thread.h"
#include "world.h"

struct pair {
  mlxdist_group* group[2];
};

static inline void pair_create(struct pair* pair, const mlxdist_options* options) {
  for (int rank = 0; rank < 2; rank++)
    REQUIRE(mlxdist_group_create(rank, 2, options, &pair->group[rank]) == MLXDIST_OK);
}

static inline uint64_t pair_addresses(struct pair* pair, char* addresses, uint64_t room) {
  uint64_t each = mlxdist_group_address_size(pair->group[0]);
  REQUIRE(2 * each <= room);
  for (int rank = 0; rank < 2; rank++)
    REQUIRE(mlxdist_group_address(pair->group[rank], addresses + each * (uint64_t)rank) == MLXDIST_OK);
  return 2 * each;
}

static inline void pair_open(struct pair* pair, const mlxdist_options* options) {
  char addresses[2 * WORLD_ADDRESS_BYTES];
  pair_create(pair, options);
  uint64_t bytes = pair_addresses(pair, addresses, sizeof addresses);
  for (int rank = 0; rank < 2; rank++) {
    REQUIRE(mlxdist_group_connect(pair->group[rank], addresses, bytes) == MLXDIST_OK);
    progress_stop(pair->group[rank]->engine);
  }
}

static inline bool pair_turn(struct pair* pair, int rank) {
  struct engine* engine = pair->group[rank]->engine;
  bool progressed = false;
  engine_lock(engine);
  engine_progress(engine, &progressed);
  engine_unlock(engine);
  return progressed;
}

static inline void pair_close(struct pair* pair) {
  for (int rank = 0; rank < 2; rank++) mlxdist_group_destroy(pair->group[rank]);
}
