#include "start.h"

/* One half of a transfer: NULL layout means that there is none. */
struct half {
  void *data;
  const mlxdist_layout *layout;
  int32_t rank;
};

static int check_half(const mlxdist_group *group, const char *name, const struct half *half) {
  if (!half->layout) return MLXDIST_OK;
  if (half->rank == group->rank)
    return fail(MLXDIST_INVALID_ARGUMENT, "%s between rank %d and itself: copy the array instead", name, half->rank);
  if (half->rank < 0 || half->rank >= group->size)
    return fail(MLXDIST_INVALID_ARGUMENT, "%s with rank %d: the group has ranks 0 to %d", name, half->rank,
                group->size - 1);
  return layout_check(name, half->layout);
}

static int transfer(mlxdist_group *group, const char *name, struct half send, struct half recv, mlxdist_call *call) {
  struct operation *operation;
  int status = check_half(group, name, &send);
  if (!status) status = check_half(group, name, &recv);
  struct wire_descriptor sends = layout_describe(WIRE_SEND, send.layout, 0, -1, MLXDIST_DIRECT);
  struct wire_descriptor receives = layout_describe(WIRE_SEND, recv.layout, 0, -1, MLXDIST_DIRECT);
  if (!status) status = operation_new(group, send.layout ? &sends : &receives, &operation);
  if (status) return status;
  if (recv.layout) operation_expect(operation, &receives);
  operation_round(operation);
  if (send.layout) operation_send(operation, send.rank, send.data, layout_bytes(send.layout));
  if (recv.layout) operation_receive(operation, recv.rank, recv.data, layout_bytes(recv.layout));
  return operation_start(operation, call);
}

int mlxdist_send(mlxdist_group *group, const void *data, const mlxdist_layout *layout, int32_t to, mlxdist_call *call) {
  return transfer(group, "send", (struct half){(void *)data, layout, to}, (struct half){0}, call);
}

int mlxdist_recv(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t from, mlxdist_call *call) {
  return transfer(group, "recv", (struct half){0}, (struct half){data, layout, from}, call);
}

int mlxdist_sendrecv(mlxdist_group *group, const void *send, const mlxdist_layout *send_layout, int32_t to, void *recv,
                     const mlxdist_layout *recv_layout, int32_t from, mlxdist_call *call) {
  return transfer(group, "sendrecv", (struct half){(void *)send, send_layout, to},
                  (struct half){recv, recv_layout, from}, call);
}
