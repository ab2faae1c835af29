#include "simulated_operation.h"

#include "sums.h"

static bool has_parts(enum simulated_kind kind) { return kind == SIMULATED_SCATTER || kind == SIMULATED_EXCHANGE; }

static uint64_t in_count(const struct simulated_operation *operation) {
  return operation->step.count * (has_parts(operation->step.kind) ? (uint64_t)operation->size : 1);
}

static uint64_t out_count(const struct simulated_operation *operation) {
  bool all = operation->step.kind == SIMULATED_GATHER || operation->step.kind == SIMULATED_EXCHANGE;
  return operation->step.kind == SIMULATED_BARRIER ? 0 : operation->step.count * (all ? (uint64_t)operation->size : 1);
}

/* What `rank` has at `i` of its `in`. */
static int32_t value(const struct simulated_operation *operation, int32_t rank, uint64_t i) {
  return (int32_t)((uint32_t)sums_value(rank, i) + (uint32_t)operation->step.salt);
}

static int32_t sum(const struct simulated_operation *operation, uint64_t i) {
  uint32_t sum = 0;
  for (int32_t rank = 0; rank < operation->size; rank++) sum += (uint32_t)value(operation, rank, i);
  return (int32_t)sum;
}

/* The reference. */
static int32_t expected(const struct simulated_operation *operation, uint64_t i) {
  uint64_t count = operation->step.count, first = (uint64_t)operation->rank * count;
  int32_t size = operation->size;
  switch (operation->step.kind) {
    case SIMULATED_SUM: return sum(operation, i);
    case SIMULATED_GATHER: return value(operation, (int32_t)(i / count), i % count);
    case SIMULATED_SCATTER: return sum(operation, first + i);
    case SIMULATED_BROADCAST: return value(operation, operation->step.root, i);
    case SIMULATED_EXCHANGE: return value(operation, (int32_t)(i / count), first + i % count);
    case SIMULATED_SHIFT: return value(operation, (operation->rank + size - 1) % size, i);
    default: return 0;
  }
}

static int32_t *allocate(uint64_t count) {
  int32_t *array = calloc(count + 1, sizeof *array);
  REQUIRE(array);
  return array;
}

static int call(struct simulated_operation *operation, mlxdist_group *group) {
  const struct simulated_step *step = &operation->step;
  int32_t next = (operation->rank + 1) % operation->size,
          previous = (operation->rank + operation->size - 1) % operation->size;
  mlxdist_call *call = &operation->call;
  int32_t *in = operation->in, *out = operation->out;
  mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {(int64_t)in_count(operation)}};
  switch (step->kind) {
    case SIMULATED_SUM: return mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, call);
    case SIMULATED_GATHER: return mlxdist_all_gather(group, in, out, &layout, call);
    case SIMULATED_SCATTER: return mlxdist_reduce_scatter(group, in, out, &layout, MLXDIST_SUM, call);
    case SIMULATED_BROADCAST: return mlxdist_broadcast(group, out, &layout, step->root, call);
    case SIMULATED_EXCHANGE: return mlxdist_all_to_all(group, in, out, &layout, call);
    case SIMULATED_SHIFT: return mlxdist_sendrecv(group, in, &layout, next, out, &layout, previous, call);
    default: return mlxdist_barrier(group, call);
  }
}

void simulated_start(struct simulated_operation *operation, mlxdist_group *group, struct simulated_step step) {
  *operation = (struct simulated_operation){.step = step,
                                            .rank = mlxdist_group_rank(group),
                                            .size = mlxdist_group_size(group),
                                            .call = {.timeout = -1, .starts = 1}};
  operation->in = allocate(in_count(operation));
  operation->out = allocate(out_count(operation));
  int32_t *filled = step.kind == SIMULATED_BROADCAST ? operation->out : operation->in;
  for (uint64_t i = 0; i < in_count(operation); i++) filled[i] = value(operation, operation->rank, i);
  operation->status = call(operation, group);
}

bool simulated_has_ended(const struct simulated_operation *operation) {
  return !operation->call.handle || mlxdist_handle_done(operation->call.handle);
}

int simulated_end(struct simulated_operation *operation) {
  REQUIRE(simulated_has_ended(operation));
  int status = operation->status;
  if (!status) status = mlxdist_handle_wait(operation->call.handle, 0);
  for (uint64_t i = 0; i < out_count(operation) && !status; i++)
    if (operation->out[i] != expected(operation, i)) {
      fprintf(stderr, "rank %d: operation %d of %llu, element %llu is %d, and should be %d\n", operation->rank,
              operation->step.kind, (unsigned long long)operation->step.count, (unsigned long long)i, operation->out[i],
              expected(operation, i));
      abort();
    }
  mlxdist_handle_free(operation->call.handle);
  free(operation->in);
  free(operation->out);
  return status;
}
