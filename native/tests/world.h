/*
 * A world of n ranks, for C tests of the engine: no Python, no rendezvous.
 *
 * The ranks are forked processes; with WORLD_THREADS they are threads of this one. Both ends of a connection then work
 * on one mapping of the shared memory, so that the thread sanitizer sees every access to it.
 *
 * Addresses are exchanged through memory shared by the ranks, with a barrier of its own; what the engine sends
 * by the side channel later, if the test wants one, goes through sockets.
 */
#pragma once

#include "mlxdist.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORLD_MAX_RANKS 8
#define WORLD_ADDRESS_BYTES 4096

struct world {
  _Atomic int arrived[64]; /* one count per barrier, none is used twice */
  int size;
  int boxes[WORLD_MAX_RANKS][2]; /* sockets: what is written to the second is for the rank that reads the first */
  char addresses[WORLD_MAX_RANKS * WORLD_ADDRESS_BYTES];
};

#define REQUIRE(condition)                                                                                           \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, mlxdist_last_error()); \
      abort();                                                                                                       \
    }                                                                                                                \
  } while (0)

static inline void world_barrier(struct world* world, int* barriers) {
  int index = (*barriers)++;
  REQUIRE(index < 64);
  atomic_fetch_add(&world->arrived[index], 1);
  while (atomic_load(&world->arrived[index]) < world->size) sched_yield();
}

static inline void world_connect(struct world* world, mlxdist_group* group, int rank, int* barriers) {
  uint64_t each = mlxdist_group_address_size(group);
  REQUIRE(each <= WORLD_ADDRESS_BYTES);
  REQUIRE(mlxdist_group_address(group, world->addresses + each * (uint64_t)rank) == MLXDIST_OK);
  world_barrier(world, barriers);
  REQUIRE(mlxdist_group_connect(group, world->addresses, each * (uint64_t)world->size) == MLXDIST_OK);
  world_barrier(world, barriers);
}

static inline mlxdist_group* world_join(struct world* world, int rank, int* barriers, const mlxdist_options* options) {
  mlxdist_group* group;
  REQUIRE(mlxdist_group_create(rank, world->size, options, &group) == MLXDIST_OK);
  world_connect(world, group, rank, barriers);
  return group;
}

static inline void world_leave(struct world* world, mlxdist_group* group, int* barriers) {
  REQUIRE(mlxdist_group_finalize(group) == MLXDIST_OK);
  world_barrier(world, barriers);
  mlxdist_group_destroy(group);
}

/* A message of the side channel, with its sender. */
struct world_message {
  int32_t from;
  char bytes[1024];
};

struct world_side {
  struct world* world;
  mlxdist_group* group;
  pthread_t thread;
  int rank;
};

static inline void world_side_send(void* context, int32_t to, const void* bytes, uint64_t length) {
  struct world_side* side = context;
  struct world_message message = {.from = side->rank};
  REQUIRE(length <= sizeof message.bytes);
  memcpy(message.bytes, bytes, length);
  REQUIRE(send(side->world->boxes[to][1], &message, offsetof(struct world_message, bytes) + length, 0) > 0);
}

static inline void* world_side_run(void* context) {
  struct world_side* side = context;
  for (;;) {
    struct world_message message;
    ssize_t length = recv(side->world->boxes[side->rank][0], &message, sizeof message, 0);
    REQUIRE(length > 0);
    if (message.from < 0) return 0;
    mlxdist_group_side_channel_receive(side->group, message.from, message.bytes,
                                       (uint64_t)length - offsetof(struct world_message, bytes));
  }
}

/* Between world_join and the first operation, on all ranks. */
static inline void world_side_open(struct world_side* side, struct world* world, mlxdist_group* group, int rank) {
  *side = (struct world_side){.world = world, .group = group, .rank = rank};
  mlxdist_group_set_side_channel(group, world_side_send, side);
  REQUIRE(pthread_create(&side->thread, 0, world_side_run, side) == 0);
}

/* Before mlxdist_group_destroy. */
static inline void world_side_close(struct world_side* side) {
  struct world_message end = {.from = -1};
  REQUIRE(send(side->world->boxes[side->rank][1], &end, sizeof end, 0) > 0);
  pthread_join(side->thread, 0);
}

/* Until all have met, another rank may need the side channel of this one to re-create a queue pair. */
static inline void world_side_leave(struct world_side* side, int* barriers) {
  REQUIRE(mlxdist_group_finalize(side->group) == MLXDIST_OK);
  world_barrier(side->world, barriers);
  world_side_close(side);
  mlxdist_group_destroy(side->group);
}

typedef void (*rank_function)(struct world* world, int rank, int size);

#define WORLD_SECONDS 120 /* a test that hangs is killed, and fails */

#ifdef WORLD_THREADS
struct world_rank {
  struct world* world;
  rank_function function;
  int rank;
  pthread_t thread;
};

static inline void* world_thread(void* argument) {
  struct world_rank* rank = argument;
  rank->function(rank->world, rank->rank, rank->world->size);
  return 0;
}

/* REQUIRE ends the process, and all ranks with it. */
static inline int world_run_ranks(struct world* world, rank_function function) {
  struct world_rank ranks[WORLD_MAX_RANKS];
  alarm(WORLD_SECONDS);
  for (int rank = 0; rank < world->size; rank++) {
    ranks[rank] = (struct world_rank){.world = world, .function = function, .rank = rank};
    REQUIRE(pthread_create(&ranks[rank].thread, 0, world_thread, &ranks[rank]) == 0);
  }
  for (int rank = 0; rank < world->size; rank++) REQUIRE(pthread_join(ranks[rank].thread, 0) == 0);
  return 0;
}
#else
static inline int world_run_ranks(struct world* world, rank_function function) {
  pid_t children[WORLD_MAX_RANKS];
  for (int rank = 0; rank < world->size; rank++) {
    children[rank] = fork();
    if (children[rank] == 0) {
      alarm(WORLD_SECONDS);
      function(world, rank, world->size);
      exit(0); /* not _exit: leak checkers report at exit */
    }
  }
  int failed = 0;
  for (int rank = 0; rank < world->size; rank++) {
    int status;
    waitpid(children[rank], &status, 0);
    if (status) {
      fprintf(stderr, "rank %d of %d ended with status 0x%x\n", rank, world->size, status);
      failed = 1;
    }
  }
  return failed;
}
#endif

/* Runs `function` as every rank; 0 if all ended well. */
static inline int world_run(int size, rank_function function) {
  struct world* world = mmap(0, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (world == MAP_FAILED) return 1;
  world->size = size;
  for (int rank = 0; rank < size; rank++)
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, world->boxes[rank])) return 1;
  int failed = world_run_ranks(world, function);
  for (int rank = 0; rank < size; rank++) {
    close(world->boxes[rank][0]);
    close(world->boxes[rank][1]);
  }
  munmap(world, sizeof *world);
  return failed;
}
