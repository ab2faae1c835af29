/*
 * The walk of one all_reduce on two ranks, for tests/native/test_instructions.py, which counts the functions that it
 * passes: valgrind --tool=callgrind --toggle-collect=measured.
 *
 * Both ranks are in one thread. One has started, so that the message of it is there; the other one, which is counted,
 * sends its own, receives, reduces and returns. Then the same with exchanged ranks.
 */
#include "pair.h"

#define COUNT 1024 /* float32: 4 KiB */
#define WARM_UP 50

static float memory[2][COUNT], results[2][COUNT];
static const mlxdist_layout layout = {.dtype = MLXDIST_FLOAT32, .ndim = 1, .shape = {COUNT}};

static int all_reduce(struct pair *pair, int rank, mlxdist_call *call) {
  return mlxdist_all_reduce(pair->group[rank], memory[rank], results[rank], &layout, MLXDIST_SUM, call);
}

__attribute__((noinline)) int measured(struct pair *pair, int rank);

int measured(struct pair *pair, int rank) { return all_reduce(pair, rank, 0); }

int main(void) {
  int (*volatile uncounted)(struct pair *, int, mlxdist_call *) = all_reduce;
  struct pair pair;
  pair_open(&pair, 0);
  for (int i = 0; i < COUNT; i++) memory[0][i] = memory[1][i] = (float)i;
  for (int i = 0; i < WARM_UP + 2; i++) {
    mlxdist_call call = {.timeout = -1, .starts = 1};
    REQUIRE(uncounted(&pair, i % 2, &call) == MLXDIST_OK);
    REQUIRE((i < WARM_UP ? uncounted(&pair, !(i % 2), 0) : measured(&pair, !(i % 2))) == MLXDIST_OK);
    REQUIRE(mlxdist_handle_wait(call.handle, -1) == MLXDIST_OK);
    mlxdist_handle_free(call.handle);
  }
  for (int i = 0; i < COUNT; i++) REQUIRE(results[0][i] == (float)(2 * i) && results[1][i] == (float)(2 * i));
  pair_close(&pair);
  printf("exact\n");
  return 0;
}
