/*
 * all_reduce on two ranks, for counting instructions: valgrind --tool=callgrind --toggle-collect=measured ... BYTES
 *
 * Both ranks are in one thread and take turns, so that nothing is counted for waiting, and a call takes as long on
 * every machine: how many timers are due does not depend on it.
 * tests/native/test_instructions.py says what the instructions were spent on.
 */
#include "pair.h"
#include "simulated_clock.h"
#include "steady_clock.h"
#include "timers.h"

#define REPEATS 50
#define CALL_NS 20000 /* what a call takes on two cores, for the timers */

static void all_reduce(struct pair *pair, float *memory[2], float *results[2], int64_t count) {
  mlxdist_layout layout = {.dtype = MLXDIST_FLOAT32, .ndim = 1, .shape = {count}};
  mlxdist_call calls[2] = {{.timeout = -1, .starts = 1}, {.timeout = -1, .starts = 1}};
  for (int rank = 0; rank < 2; rank++)
    REQUIRE(mlxdist_all_reduce(pair->group[rank], memory[rank], results[rank], &layout, MLXDIST_SUM, &calls[rank]) ==
            MLXDIST_OK);
  while (!mlxdist_handle_done(calls[0].handle) || !mlxdist_handle_done(calls[1].handle))
    for (int rank = 0; rank < 2; rank++) pair_turn(pair, rank);
  simulated_clock_pass(CALL_NS);
  for (int rank = 0; rank < 2; rank++) {
    struct engine *engine = pair->group[rank]->engine;
    engine_lock(engine);
    engine_check_timers(engine, clock_ns());
    engine_unlock(engine);
    mlxdist_handle_free(calls[rank].handle);
  }
}

__attribute__((noinline)) void measured(struct pair *pair, float *memory[2], float *results[2], int64_t count);

void measured(struct pair *pair, float *memory[2], float *results[2], int64_t count) {
  for (int i = 0; i < REPEATS; i++) all_reduce(pair, memory, results, count);
}

int main(int argc, char **argv) {
  REQUIRE(argc == 2);
  int64_t count = atoi(argv[1]) / (int64_t)sizeof(float);
  float *memory[2], *results[2];
  for (int rank = 0; rank < 2; rank++) {
    memory[rank] = calloc((size_t)count, sizeof(float));
    results[rank] = calloc((size_t)count, sizeof(float));
    REQUIRE(memory[rank] && results[rank]);
    for (int64_t i = 0; i < count; i++) memory[rank][i] = (float)(i % 1000 + rank);
  }
  struct pair pair;
  pair_open(&pair, 0);
  for (int i = 0; i < 10; i++) all_reduce(&pair, memory, results, count);
  measured(&pair, memory, results, count);
  for (int rank = 0; rank < 2; rank++)
    for (int64_t i = 0; i < count; i++) REQUIRE(results[rank][i] == (float)(2 * (i % 1000) + 1));
  pair_close(&pair);
  printf("exact\n");
  return 0;
}
