#include "mesh.h"

#include "reduce.h"

fold_kernel mesh_kernel(const char *name, const mlxdist_layout *layout, int32_t op) {
  fold_kernel kernel = reduce_kernel(layout->dtype, op);
  if (!kernel) fail(MLXDIST_INVALID_ARGUMENT, "%s: there is no reduction %d of dtype %d", name, op, layout->dtype);
  return kernel;
}

/* 128-bit products: count * rank may pass 64 bits for arrays that no machine holds, but must not wrap. */
static uint64_t part_begin(uint64_t count, int32_t rank, int32_t size) {
  return (uint64_t)((unsigned __int128)count * (unsigned)rank / (unsigned)size);
}

struct part part_of(uint64_t count, uint32_t element_bytes, int32_t rank, int32_t size) {
  uint64_t begin = part_begin(count, rank, size), end = part_begin(count, rank + 1, size);
  return (struct part){.offset = begin * element_bytes, .bytes = (end - begin) * element_bytes};
}

void mesh_init(struct mesh *mesh, mlxdist_group *group) {
  mesh->peers = 0;
  for (int32_t rank = 0; rank < group->engine.size; rank++)
    if (rank != group->engine.rank) mesh->streams[mesh->peers++] = (struct stream){.peer = &group->engine.peers[rank]};
}

int mesh_meet(mlxdist_group *group, enum wire_operation operation) {
  struct mesh sends, receives;
  mesh_init(&sends, group);
  mesh_init(&receives, group);
  struct wire_descriptor descriptor = layout_describe(operation, 0, 0, -1);
  return exchange_run(&(struct exchange){.group = group,
                                         .sends = descriptor,
                                         .receives = descriptor,
                                         .out = sends.streams,
                                         .outs = sends.peers,
                                         .in = receives.streams,
                                         .ins = receives.peers});
}

int mesh_reduce_all(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel, const char *in,
                    char *out, uint64_t bytes, uint32_t element_bytes) {
  struct mesh sends, receives;
  mesh_init(&sends, group);
  mesh_init(&receives, group);
  for (int i = 0; i < sends.peers; i++) {
    sends.streams[i].data = (char *)in;
    sends.streams[i].bytes = receives.streams[i].bytes = bytes;
  }
  struct fold fold = {.kernel = kernel,
                      .element_bytes = element_bytes,
                      .own = in,
                      .out = out,
                      .bytes = bytes,
                      .in_place = in == out};
  return exchange_run(&(struct exchange){.group = group,
                                         .sends = *descriptor,
                                         .receives = *descriptor,
                                         .out = sends.streams,
                                         .outs = sends.peers,
                                         .in = receives.streams,
                                         .ins = receives.peers,
                                         .fold = &fold});
}

int mesh_reduce_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel,
                      const char *in, char *out, uint64_t count, uint32_t element_bytes) {
  int32_t size = group->engine.size;
  struct part own = part_of(count, element_bytes, group->engine.rank, size);
  struct mesh sends, receives;
  mesh_init(&sends, group);
  mesh_init(&receives, group);
  for (int i = 0; i < sends.peers; i++) {
    struct part theirs = part_of(count, element_bytes, sends.streams[i].peer->rank, size);
    sends.streams[i].data = (char *)in + theirs.offset;
    sends.streams[i].bytes = theirs.bytes;
    receives.streams[i].bytes = own.bytes;
  }
  struct fold fold = {.kernel = kernel,
                      .element_bytes = element_bytes,
                      .own = in + own.offset,
                      .out = out,
                      .bytes = own.bytes,
                      /* Its own part nobody else reads; elsewhere in `in` lie the parts of others. */
                      .in_place = out >= in && out < in + count * element_bytes && out != in + own.offset};
  return exchange_run(&(struct exchange){.group = group,
                                         .sends = *descriptor,
                                         .receives = *descriptor,
                                         .out = sends.streams,
                                         .outs = sends.peers,
                                         .in = receives.streams,
                                         .ins = receives.peers,
                                         .fold = &fold});
}

int mesh_gather_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, const char *own, char *out,
                      uint64_t count, uint32_t element_bytes) {
  int32_t size = group->engine.size;
  struct part mine = part_of(count, element_bytes, group->engine.rank, size);
  struct mesh sends, receives;
  mesh_init(&sends, group);
  mesh_init(&receives, group);
  for (int i = 0; i < sends.peers; i++) {
    struct part theirs = part_of(count, element_bytes, sends.streams[i].peer->rank, size);
    sends.streams[i].data = (char *)own;
    sends.streams[i].bytes = mine.bytes;
    receives.streams[i].data = out + theirs.offset;
    receives.streams[i].bytes = theirs.bytes;
  }
  return exchange_run(&(struct exchange){.group = group,
                                         .sends = *descriptor,
                                         .receives = *descriptor,
                                         .out = sends.streams,
                                         .outs = sends.peers,
                                         .in = receives.streams,
                                         .ins = receives.peers});
}
