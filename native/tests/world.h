/*
 * A world of n ranks in n forked processes, for C tests of the engine: no Python, no rendezvous.
 *
 * The side channel is memory shared by the processes, with a barrier of its own.
 */
#ifndef MLXDIST_TESTS_WORLD_H
#define MLXDIST_TESTS_WORLD_H

#include "mlxdist.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORLD_MAX_RANKS 8
#define WORLD_ADDRESS_BYTES 4096

struct world {
  _Atomic int arrived[64]; /* one count per barrier, none is used twice */
  int size;
  char addresses[WORLD_MAX_RANKS * WORLD_ADDRESS_BYTES];
};

#define REQUIRE(condition)                                                                             \
  do {                                                                                                 \
    if (!(condition)) {                                                                                \
      fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition,          \
              mlxdist_last_error());                                                                   \
      _exit(1);                                                                                        \
    }                                                                                                  \
  } while (0)

static inline void world_barrier(struct world *world, int *barriers) {
  int index = (*barriers)++;
  REQUIRE(index < 64);
  atomic_fetch_add(&world->arrived[index], 1);
  while (atomic_load(&world->arrived[index]) < world->size) sched_yield();
}

static inline mlxdist_group *world_join(struct world *world, int rank, int *barriers, const mlxdist_options *options) {
  mlxdist_group *group;
  REQUIRE(mlxdist_group_create(rank, world->size, options, &group) == MLXDIST_OK);
  uint64_t each = mlxdist_group_address_size(group);
  REQUIRE(each <= WORLD_ADDRESS_BYTES);
  REQUIRE(mlxdist_group_address(group, world->addresses + each * (uint64_t)rank) == MLXDIST_OK);
  world_barrier(world, barriers);
  REQUIRE(mlxdist_group_connect(group, world->addresses, each * (uint64_t)world->size) == MLXDIST_OK);
  world_barrier(world, barriers);
  return group;
}

static inline void world_leave(struct world *world, mlxdist_group *group, int *barriers) {
  REQUIRE(mlxdist_group_finalize(group) == MLXDIST_OK);
  world_barrier(world, barriers);
  mlxdist_group_destroy(group);
}

typedef void (*rank_function)(struct world *world, int rank, int size);

/* Runs `function` as every rank; 0 if all processes ended well. */
static inline int world_run(int size, rank_function function) {
  struct world *world = mmap(0, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (world == MAP_FAILED) return 1;
  world->size = size;
  pid_t children[WORLD_MAX_RANKS];
  for (int rank = 0; rank < size; rank++) {
    children[rank] = fork();
    if (children[rank] == 0) {
      alarm(120); /* a test that hangs is killed, and fails */
      function(world, rank, size);
      exit(0); /* not _exit: leak checkers report at exit */
    }
  }
  int failed = 0;
  for (int rank = 0; rank < size; rank++) {
    int status;
    waitpid(children[rank], &status, 0);
    if (status) {
      fprintf(stderr, "rank %d of %d ended with status 0x%x\n", rank, size, status);
      failed = 1;
    }
  }
  munmap(world, sizeof *world);
  return failed;
}

#endif
