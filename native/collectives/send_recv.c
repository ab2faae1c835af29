#include "exchange.h"

/* One half of a transfer: NULL layout means that there is none. */
struct half {
  void *data;
  const mlxdist_layout *layout;
  int32_t rank;
};

static int prepare(mlxdist_group *group, const char *name, const struct half *half, struct stream *stream) {
  if (!half->layout) return MLXDIST_OK;
  int status = layout_check(name, half->layout);
  if (status) return status;
  stream->peer = group_peer(group, name, half->rank);
  if (!stream->peer) return MLXDIST_INVALID_ARGUMENT;
  stream->data = half->data;
  stream->bytes = layout_bytes(half->layout);
  return MLXDIST_OK;
}

static int transfer(mlxdist_group *group, const char *name, struct half send, struct half recv) {
  uint64_t started;
  struct stream out = {0}, in = {0};
  int status = prepare(group, name, &send, &out);
  if (!status) status = prepare(group, name, &recv, &in);
  if (!status) status = operation_begin(group, name, 0, &started);
  if (status) return status;
  struct wire_descriptor sends = layout_describe(WIRE_SEND, send.layout, 0, -1);
  struct wire_descriptor receives = layout_describe(WIRE_SEND, recv.layout, 0, -1);
  status = exchange_run(&(struct exchange){.group = group,
                                           .sends = sends,
                                           .receives = recv.layout ? receives : sends,
                                           .out = &out,
                                           .outs = send.layout != 0,
                                           .in = &in,
                                           .ins = recv.layout != 0});
  return operation_end(group, status, started, &group->engine.counters.point_to_point);
}

int mlxdist_send(mlxdist_group *group, const void *data, const mlxdist_layout *layout, int32_t to) {
  return transfer(group, "send", (struct half){(void *)data, layout, to}, (struct half){0});
}

int mlxdist_recv(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t from) {
  return transfer(group, "recv", (struct half){0}, (struct half){data, layout, from});
}

int mlxdist_sendrecv(mlxdist_group *group, const void *send, const mlxdist_layout *send_layout, int32_t to, void *recv,
                     const mlxdist_layout *recv_layout, int32_t from) {
  return transfer(group, "sendrecv", (struct half){(void *)send, send_layout, to},
                  (struct half){recv, recv_layout, from});
}
