/*
 * A simulation of n ranks: real engines over the soft provider, all in one thread, with a clock of its own. Which rank
 * is next, how long its turn takes, and when a message of the side channel arrives, is drawn from a seed. The same seed
 * gives the same run, and nothing waits: a deadline of a minute takes as long as its turns.
 *
 * This follows quinn-proto's tests and FoundationDB's simulation: time, order and loss are inputs of the protocol.
 * The engine's own threads and blocking calls are not part of it; world.h has tests of those.
 */
#pragma once

#include "engine.h"
#include "mlxdist.h"
#include "simulated_operation.h"
#include "world.h"

#define MILLISECOND UINT64_C(1000000)
#define SECOND (1000 * MILLISECOND)

struct simulated_rank {
  struct simulation* simulation;
  int32_t rank;
  mlxdist_group* group;
  uint64_t sleeps_until_ns; /* it gets no turn before: its process is stopped, or waits for a core */
};

/* On its way by the side channel. */
struct simulated_message {
  int32_t from, to;
  uint64_t arrives_ns, length;
  char bytes[sizeof((struct world_message*)0)->bytes];
};

#define SIMULATED_MESSAGES 256

struct simulation {
  int32_t size;
  uint64_t now_ns, turns, generator;
  uint32_t idle_turns; /* since a rank has found something to do */
  struct simulated_rank ranks[WORLD_MAX_RANKS];
  struct simulated_message messages[SIMULATED_MESSAGES];
  int message_count;
};

/* Connects `size` ranks; without `options` with the default ones. `side_channel`: they have one, by which queue pairs
 * are re-created. */
void simulation_open(struct simulation* simulation, int32_t size, const mlxdist_options* options, bool side_channel,
                     uint64_t seed);
void simulation_close(struct simulation* simulation);

/* A number below `limit`, which is not 0. */
uint64_t simulation_draw(struct simulation* simulation, uint64_t limit);

/* A turn of one rank, which passes while that sleeps. */
void simulation_turn(struct simulation* simulation);

/* Turns until so much time has passed. */
void simulation_run(struct simulation* simulation, uint64_t ns);

/* Starts an operation on all ranks and runs until all have ended, which must be within `limit_ns`. Returns the status,
 * which must be the same on all. */
int simulation_run_operation(struct simulation* simulation, struct simulated_step step, uint64_t limit_ns);

/* Such a sum of `count` numbers, within 100 s. */
int simulation_sum(struct simulation* simulation, uint64_t count);

mlxdist_stats simulation_stats(const struct simulation* simulation, int32_t rank);

/* Faults of what `rank` sends; of all ranks with -1. */
void simulation_inject(const struct simulation* simulation, int32_t rank, const char* faults);
