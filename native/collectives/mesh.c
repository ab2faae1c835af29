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
  mesh->group = group;
  mesh->peers = 0;
  for (int32_t rank = 0; rank < group->engine.size; rank++) {
    if (rank == group->engine.rank) continue;
    struct stream stream = {.peer = &group->engine.peers[rank]};
    mesh->out[mesh->peers] = mesh->in[mesh->peers] = stream;
    mesh->peers++;
  }
}

int mesh_run(struct mesh *mesh, const struct wire_descriptor *descriptor, struct fold *fold) {
  return exchange_run(&(struct exchange){.group = mesh->group,
                                         .sends = *descriptor,
                                         .receives = *descriptor,
                                         .out = mesh->out,
                                         .outs = mesh->peers,
                                         .in = mesh->in,
                                         .ins = mesh->peers,
                                         .fold = fold});
}

int mesh_meet(mlxdist_group *group, enum wire_operation operation) {
  struct mesh mesh;
  mesh_init(&mesh, group);
  struct wire_descriptor descriptor = layout_describe(operation, 0, 0, -1);
  return mesh_run(&mesh, &descriptor, 0);
}

int mesh_reduce_all(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel, const char *in,
                    char *out, uint64_t bytes, uint32_t element_bytes) {
  struct mesh mesh;
  mesh_init(&mesh, group);
  for (int i = 0; i < mesh.peers; i++) {
    mesh.out[i].data = (char *)in;
    mesh.out[i].bytes = mesh.in[i].bytes = bytes;
  }
  struct fold fold = {.kernel = kernel, .element_bytes = element_bytes, .own = in, .out = out, .in_place = in == out};
  return mesh_run(&mesh, descriptor, &fold);
}

int mesh_reduce_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel,
                      const char *in, char *out, uint64_t count, uint32_t element_bytes) {
  int32_t size = group->engine.size;
  struct part own = part_of(count, element_bytes, group->engine.rank, size);
  struct mesh mesh;
  mesh_init(&mesh, group);
  for (int i = 0; i < mesh.peers; i++) {
    struct part theirs = part_of(count, element_bytes, mesh.out[i].peer->rank, size);
    mesh.out[i].data = (char *)in + theirs.offset;
    mesh.out[i].bytes = theirs.bytes;
    mesh.in[i].bytes = own.bytes;
  }
  /* Its own part nobody else reads; elsewhere in `in` lie the parts of others. */
  bool in_place = out >= in && out < in + count * element_bytes && out != in + own.offset;
  struct fold fold = {
      .kernel = kernel, .element_bytes = element_bytes, .own = in + own.offset, .out = out, .in_place = in_place};
  return mesh_run(&mesh, descriptor, &fold);
}

int mesh_gather_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, const char *own, char *out,
                      uint64_t count, uint32_t element_bytes) {
  int32_t size = group->engine.size;
  struct part mine = part_of(count, element_bytes, group->engine.rank, size);
  struct mesh mesh;
  mesh_init(&mesh, group);
  for (int i = 0; i < mesh.peers; i++) {
    struct part theirs = part_of(count, element_bytes, mesh.in[i].peer->rank, size);
    mesh.out[i].data = (char *)own;
    mesh.out[i].bytes = mine.bytes;
    mesh.in[i].data = out + theirs.offset;
    mesh.in[i].bytes = theirs.bytes;
  }
  return mesh_run(&mesh, descriptor, 0);
}
