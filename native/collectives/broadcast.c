#include "mesh.h"

int mlxdist_broadcast(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t root) {
  uint64_t started;
  int32_t rank = group->engine.rank, size = group->engine.size;
  if (root < 0 || root >= size)
    return fail(MLXDIST_INVALID_ARGUMENT, "broadcast from rank %d: the group has ranks 0 to %d", root, size - 1);
  int status = operation_begin(group, "broadcast", layout, &started);
  if (status) return status;
  struct exchange exchange = {.group = group};
  exchange.sends = exchange.receives = layout_describe(WIRE_BROADCAST, layout, 0, root);
  struct mesh mesh;
  struct stream from_root = {.peer = &group->engine.peers[root], .data = data, .bytes = layout_bytes(layout)};
  if (rank == root) {
    mesh_init(&mesh, group);
    for (int i = 0; i < mesh.peers; i++) {
      mesh.out[i].data = data;
      mesh.out[i].bytes = from_root.bytes;
    }
    exchange.out = mesh.out;
    exchange.outs = mesh.peers;
  } else {
    exchange.in = &from_root;
    exchange.ins = 1;
  }
  status = exchange_run(&exchange);
  return operation_end(group, status, started, &group->engine.counters.collectives);
}
