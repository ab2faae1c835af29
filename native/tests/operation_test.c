/* Operations without collectives: schedules that are written by hand, between two ranks of one thread. */
#include "operation.h"

#include "backoff.h"
#include "pair.h"
#include "start.h"
#include "straggler.h"

#define COUNT 40000 /* several messages */

static void add(void *out, const void *const *sources, int sources_count, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    int32_t sum = 0;
    for (int s = 0; s < sources_count; s++) sum += ((const int32_t *)sources[s])[i];
    ((int32_t *)out)[i] = sum;
  }
}

static const mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {COUNT}};
static int32_t in[2][COUNT], out[2][COUNT];

static struct operation *new_operation(mlxdist_group *group) {
  struct wire_descriptor descriptor = layout_describe(MLXDIST_ALL_REDUCE, &layout, MLXDIST_SUM, -1, MLXDIST_DIRECT);
  struct operation *operation;
  REQUIRE(operation_new(group, &descriptor, &operation) == MLXDIST_OK);
  return operation;
}

/* Rank 1 sends to rank 0, which reduces and sends the result back: two rounds. */
static void write_schedule(struct operation *operation, int rank) {
  uint64_t bytes = sizeof in[0];
  operation_round(operation);
  if (rank == 1) operation_send(operation, 0, in[1], bytes);
  if (rank == 0) operation_receive(operation, 1, 0, bytes);
  struct reduce_step step = {
      .kernel = add, .element_bytes = sizeof(int32_t), .own = (const char *)in[0], .out = (char *)out[0]};
  if (rank == 0) operation_reduce(operation, step);
  operation_round(operation);
  if (rank == 0) operation_send(operation, 1, out[0], bytes);
  if (rank == 1) operation_receive(operation, 0, out[1], bytes);
}

static void run(struct pair *pair, int first) {
  mlxdist_call calls[2] = {{.timeout = -1, .starts = 1}, {.timeout = -1, .starts = 1}};
  for (int i = 0; i < 2; i++) {
    int rank = i == 0 ? first : !first;
    struct operation *operation = new_operation(pair->group[rank]);
    write_schedule(operation, rank);
    REQUIRE(operation_start(operation, &calls[rank]) == MLXDIST_OK);
    if (i > 0) continue;
    struct straggler straggler = operation_straggler((struct operation *)calls[rank].handle);
    REQUIRE(straggler.rank == !rank && !straggler.entered && straggler.receives == (rank == 0));
  }
  while (!mlxdist_handle_done(calls[0].handle) || !mlxdist_handle_done(calls[1].handle))
    for (int rank = 0; rank < 2; rank++) pair_turn(pair, rank);
  for (int rank = 0; rank < 2; rank++) {
    REQUIRE(mlxdist_handle_wait(calls[rank].handle, -1) == MLXDIST_OK);
    mlxdist_handle_free(calls[rank].handle);
  }
  for (int i = 0; i < COUNT; i++) REQUIRE(out[0][i] == 3 * i && out[1][i] == 3 * i);
}

/* Pauses of one wait that only spin. A rank that waits lets go of its core at once where a peer may need it. */
static int spins(bool crowded) {
  struct backoff backoff = {0};
  int count = 0;
  backoff_set_crowded(crowded);
  for (; backoff_spins(&backoff); count++) REQUIRE(backoff_pause(&backoff) == 0);
  REQUIRE(backoff_pause(&backoff) > 0 && backoff_reset(&backoff) > 0 && backoff_spins(&backoff));
  return count;
}

int main(void) {
  REQUIRE(spins(true) == 1 && spins(false) == 19);
  struct pair pair;
  pair_open(&pair, 0);
  for (int i = 0; i < COUNT; i++) in[1][i] = 2 * (in[0][i] = i);
  for (int i = 0; i < 20; i++) {
    memset(out, 0, sizeof out);
    run(&pair, i % 2);
  }
  mlxdist_flight_record records[64];
  REQUIRE(mlxdist_flight_read(pair.group[0], records, 64) == 20 && strcmp(records[0].operation, "all_sum") == 0);
  mlxdist_group_fail(pair.group[0], MLXDIST_OK, "a failure without a number");
  REQUIRE(mlxdist_group_error(pair.group[0]) == MLXDIST_ABORTED);
  pair_close(&pair);
  printf("operation_test passed\n");
  return 0;
}
