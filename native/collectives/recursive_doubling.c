#include "recursive_doubling.h"

static void reduce_with(struct operation *operation, const struct reduction *reduction, int32_t partner, bool sends,
                        const char *own, char *out) {
  operation_round(operation);
  if (sends) operation_send(operation, partner, own, reduction->bytes);
  operation_receive(operation, partner, 0, reduction->bytes);
  reduction_add(operation, reduction, own, partner < operation_group(operation)->rank, out, sends && own == out);
}

void recursive_doubling_all_reduce(struct operation *operation, const struct reduction *reduction, const char *in,
                                   char *out) {
  int32_t rank = operation_group(operation)->rank, size = operation_group(operation)->size;
  int32_t power = 1;
  while (power * 2 <= size) power *= 2;
  int32_t paired = 2 * (size - power); /* ranks below this work in pairs: the even one lets the odd one work */
  if (rank < paired && rank % 2 == 0) {
    operation_round(operation);
    operation_send(operation, rank + 1, in, reduction->bytes);
    operation_round(operation);
    operation_receive(operation, rank + 1, out, reduction->bytes);
    return;
  }
  const char *own = in;
  if (rank < paired) {
    reduce_with(operation, reduction, rank - 1, false, in, out);
    own = out;
  }
  int32_t number = rank < paired ? rank / 2 : rank - paired / 2;
  for (int32_t distance = 1; distance < power; distance *= 2) {
    int32_t other = number ^ distance;
    reduce_with(operation, reduction, other < paired / 2 ? 2 * other + 1 : other + paired / 2, true, own, out);
    own = out;
  }
  if (rank < paired) {
    operation_round(operation);
    operation_send(operation, rank - 1, out, reduction->bytes);
  }
}

void recursive_doubling_barrier(struct operation *operation) {
  int32_t rank = operation_group(operation)->rank, size = operation_group(operation)->size;
  for (int32_t distance = 1; distance < size; distance *= 2) {
    operation_round(operation);
    operation_send(operation, (rank + distance) % size, 0, 0);
    operation_receive(operation, (rank - distance + size) % size, 0, 0);
  }
}
