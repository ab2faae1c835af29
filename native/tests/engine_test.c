/* The engine on forked processes: every operation with exact results, its counters, and what it refuses.
 * tests/ranks/test_collectives.py compares values with NumPy over all dtypes; this one runs under sanitizers. */
#include "group.h"
#include "sums.h"

/* Small integers: any order of additions gives the same float. */
static float value(int rank, uint64_t i, int salt) {
  return (float)((int)((i * 7 + (uint64_t)salt) % 1000) - 500 + rank);
}

static float sum_of(int size, uint64_t i, int salt) {
  float sum = 0;
  for (int rank = 0; rank < size; rank++) sum += value(rank, i, salt);
  return sum;
}

static mlxdist_layout vector(int64_t count) {
  return (mlxdist_layout){.dtype = MLXDIST_FLOAT32, .ndim = 1, .shape = {count}};
}

static float *filled(int rank, uint64_t count, int salt) {
  float *array = malloc((count + 1) * sizeof *array);
  REQUIRE(array);
  for (uint64_t i = 0; i < count; i++) array[i] = value(rank, i, salt);
  return array;
}

static void all_reduce(mlxdist_group *group, int rank, int size, uint64_t count, int salt, int in_place) {
  float *in = filled(rank, count, salt), *out = in_place ? in : malloc((count + 1) * sizeof *out);
  mlxdist_layout layout = vector((int64_t)count);
  REQUIRE(mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, 0) == MLXDIST_OK);
  for (uint64_t i = 0; i < count; i++) REQUIRE(out[i] == sum_of(size, i, salt));
  if (!in_place) free(out);
  free(in);
}

static void all_gather(mlxdist_group *group, int rank, int size, uint64_t count, int salt) {
  float *in = filled(rank, count, salt), *out = malloc((count * (uint64_t)size + 1) * sizeof *out);
  mlxdist_layout layout = vector((int64_t)count);
  REQUIRE(mlxdist_all_gather(group, in, out, &layout, 0) == MLXDIST_OK);
  for (int from = 0; from < size; from++)
    for (uint64_t i = 0; i < count; i++) REQUIRE(out[(uint64_t)from * count + i] == value(from, i, salt));
  free(out);
  free(in);
}

static void reduce_scatter(mlxdist_group *group, int rank, int size, uint64_t part, int salt, int in_place) {
  uint64_t count = part * (uint64_t)size;
  float *in = filled(rank, count, salt), *out = in_place ? in : malloc((part + 1) * sizeof *out);
  mlxdist_layout layout = vector((int64_t)count);
  REQUIRE(mlxdist_reduce_scatter(group, in, out, &layout, MLXDIST_SUM, 0) == MLXDIST_OK);
  for (uint64_t i = 0; i < part; i++) REQUIRE(out[i] == sum_of(size, part * (uint64_t)rank + i, salt));
  if (!in_place) free(out);
  free(in);
}

static void broadcast(mlxdist_group *group, int rank, int root, uint64_t count, int salt) {
  float *data = filled(rank, count, salt);
  mlxdist_layout layout = vector((int64_t)count);
  REQUIRE(mlxdist_broadcast(group, data, &layout, root, 0) == MLXDIST_OK);
  for (uint64_t i = 0; i < count; i++) REQUIRE(data[i] == value(root, i, salt));
  free(data);
}

/* Around a ring: with sendrecv, and with send and recv of messages larger than all slots together. */
static void ring(mlxdist_group *group, int rank, int size, uint64_t count, int salt, int split) {
  int to = (rank + 1) % size, from = (rank + size - 1) % size;
  float *send = filled(rank, count, salt), *recv = malloc((count + 1) * sizeof *recv);
  mlxdist_layout layout = vector((int64_t)count);
  if (!split) {
    REQUIRE(mlxdist_sendrecv(group, send, &layout, to, recv, &layout, from, 0) == MLXDIST_OK);
  } else if (rank == 0) { /* one rank receives last, so that the ring cannot wait for itself */
    REQUIRE(mlxdist_send(group, send, &layout, to, 0) == MLXDIST_OK);
    REQUIRE(mlxdist_recv(group, recv, &layout, from, 0) == MLXDIST_OK);
  } else {
    REQUIRE(mlxdist_recv(group, recv, &layout, from, 0) == MLXDIST_OK);
    REQUIRE(mlxdist_send(group, send, &layout, to, 0) == MLXDIST_OK);
  }
  for (uint64_t i = 0; i < count; i++) REQUIRE(recv[i] == value(from, i, salt));
  free(recv);
  free(send);
}

static void check_books(mlxdist_group *group, int size) {
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  REQUIRE(stats.post_send_calls == stats.messages_sent && stats.provider_sends == stats.messages_sent);
  REQUIRE(stats.provider_receives == stats.post_recv_calls && stats.provider_polls == stats.poll_cq_calls);
  /* On a busy machine a rank may be kept off the CPU for so long that its peer retransmits a message. */
  REQUIRE(stats.retransmissions || stats.provider_bytes_sent == stats.payload_bytes_sent + stats.header_bytes_sent);
  /* Only what may be lost without harm meets no receive: acknowledgements and repetitions. */
  REQUIRE(stats.provider_dropped <= stats.control_messages_sent + stats.retransmissions);
  /* No receive is lost or posted twice: each slot is posted, or holds a message that is on its way to us. */
  REQUIRE(stats.receives_posted <= (uint64_t)(size - 1) * (32 + 6));
  REQUIRE(stats.slab_bytes <= (uint64_t)(size - 1) << 21);
}

static const uint64_t counts[] = {0, 1, 3, 992, 993, 1024, 5001, 32736, 32737, 65536, 300001};

static void every_operation(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
    int salt = (int)c;
    all_reduce(group, rank, size, counts[c], salt, 0);
    all_reduce(group, rank, size, counts[c], salt + 1, 1);
    all_gather(group, rank, size, counts[c], salt);
    reduce_scatter(group, rank, size, counts[c], salt, 0);
    reduce_scatter(group, rank, size, counts[c], salt + 1, 1);
    broadcast(group, rank, (int)c % size, counts[c], salt);
    if (size > 1) ring(group, rank, size, counts[c], salt, 0);
    if (size > 1) ring(group, rank, size, counts[c], salt, 1);
    REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_OK);
  }
  if (size > 1) check_books(group, size);
  world_leave(world, group, &barriers);
}

/* Many small messages one way, with nothing to ride on for the acknowledgements, then a large one back
 * while the receiver has not yet taken the small ones. */
static void one_way(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  mlxdist_layout small = vector(100), large = vector(1 << 20);
  float *array = filled(rank, 1 << 20, 0);
  (void)size;
  if (rank == 0) {
    for (int i = 0; i < 500; i++) REQUIRE(mlxdist_send(group, array, &small, 1, 0) == MLXDIST_OK);
    for (int i = 0; i < 28; i++) REQUIRE(mlxdist_send(group, array, &small, 1, 0) == MLXDIST_OK);
    REQUIRE(mlxdist_recv(group, array, &large, 1, 0) == MLXDIST_OK);
    for (uint64_t i = 0; i < 1 << 20; i++) REQUIRE(array[i] == value(1, i, 0));
  } else {
    for (int i = 0; i < 500; i++) REQUIRE(mlxdist_recv(group, array, &small, 0, 0) == MLXDIST_OK);
    free(array);
    array = filled(rank, 1 << 20, 0);
    REQUIRE(mlxdist_send(group, array, &large, 0, 0) == MLXDIST_OK);
    for (int i = 0; i < 28; i++) REQUIRE(mlxdist_recv(group, array, &small, 0, 0) == MLXDIST_OK);
  }
  free(array);
  world_leave(world, group, &barriers);
}

/* What one all_sum of 8 KiB between two ranks costs: one message each way, one receive given back, no more. */
static void cost_of_one_all_sum(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  all_reduce(group, rank, size, 2048, 0, 0);
  mlxdist_stats before, after;
  mlxdist_group_stats(group, &before);
  all_reduce(group, rank, size, 2048, 1, 0);
  mlxdist_group_stats(group, &after);
  REQUIRE(after.post_send_calls - before.post_send_calls == 1 && after.provider_sends - before.provider_sends == 1);
  REQUIRE(after.post_recv_calls - before.post_recv_calls == 1);
  REQUIRE(after.provider_receives - before.provider_receives == 1);
  REQUIRE(after.poll_cq_calls - before.poll_cq_calls >= 1);
  REQUIRE(after.poll_cq_calls - before.poll_cq_calls == after.provider_polls - before.provider_polls);
  REQUIRE(after.payload_bytes_sent - before.payload_bytes_sent == 8192);
  REQUIRE(after.header_bytes_sent - before.header_bytes_sent == 128);
  REQUIRE(after.bytes_copied - before.bytes_copied == 8192); /* into the slot; the reduction reads what landed */
  world_leave(world, group, &barriers);
}

/* What is large leaves from where it is, in place too, and comes to where the reduction reads it: nothing is copied. */
static void copies_of_one_large_all_sum(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  for (int in_place = 0; in_place < 2; in_place++) {
    mlxdist_stats before, after;
    mlxdist_group_stats(group, &before);
    all_reduce(group, rank, size, 1 << 18, in_place, in_place);
    mlxdist_group_stats(group, &after);
    REQUIRE(after.payload_bytes_sent - before.payload_bytes_sent == 1 << 20);
    REQUIRE(after.memory_registrations - before.memory_registrations == 1);
    REQUIRE(after.bytes_copied == before.bytes_copied);
  }
  world_leave(world, group, &barriers);
}

static void different_shapes(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  /* On the same queue pair, and on different ones: neither may hang. */
  mlxdist_layout layout = vector(rank == size - 1 ? 200000 : 10);
  float *array = filled(rank, 200000, 0);
  int status = mlxdist_all_reduce(group, array, array, &layout, MLXDIST_SUM, 0);
  char text[1024];
  snprintf(text, sizeof text, "%s", mlxdist_last_error());
  REQUIRE(status == MLXDIST_MISMATCH);
  REQUIRE(strstr(text, "[200000]") && strstr(text, "[10]"));
  REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_MISMATCH && strcmp(text, mlxdist_last_error()) == 0);
  world_barrier(world, &barriers);
  free(array);
  mlxdist_group_destroy(group);
}

/* Who watches passes a failure on to the other ranks: none may be missed, however late. */
static void a_failure_just_before_the_end(struct world *world, int rank, int size) {
  (void)size;
  for (int fails = 0; fails < 2; fails++) {
    int barriers = 0;
    mlxdist_group *group = world_join(world, rank, &barriers, 0);
    if (fails) mlxdist_group_abort(group, MLXDIST_MISMATCH, "ranks disagree");
    mlxdist_group_stop_watching(group);
    REQUIRE(mlxdist_group_watch_failure(group) == fails);
    REQUIRE(!fails || !strcmp(mlxdist_last_error(), "ranks disagree"));
    mlxdist_group_destroy(group);
  }
}

static void different_operations(struct world *world, int rank, int size) {
  int barriers = 0;
  (void)size;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  mlxdist_layout layout = vector(10);
  float *array = filled(rank, 100, 0), *out = filled(rank, 100, 0);
  int status = rank == 0 ? mlxdist_all_reduce(group, array, out, &layout, MLXDIST_MAX, 0)
                         : mlxdist_all_gather(group, array, out, &layout, 0);
  REQUIRE(status == MLXDIST_MISMATCH);
  REQUIRE(strstr(mlxdist_last_error(), "all_max of float32 [10]") && strstr(mlxdist_last_error(), "all_gather"));
  world_barrier(world, &barriers);
  free(array);
  free(out);
  mlxdist_group_destroy(group);
}

static void refused_without_harm(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  float array[8] = {0};
  mlxdist_layout layout = vector(7), negative = vector(-1), unknown = vector(1);
  unknown.dtype = 99;
  REQUIRE(mlxdist_reduce_scatter(group, array, array, &layout, MLXDIST_SUM, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_all_reduce(group, array, array, &negative, MLXDIST_SUM, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_all_reduce(group, array, array, &unknown, MLXDIST_SUM, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_all_reduce(group, array, array, &layout, 17, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_broadcast(group, array, &layout, size, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_send(group, array, &layout, rank, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_recv(group, array, &layout, -1, 0) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(mlxdist_group_error(group) == MLXDIST_OK);
  all_reduce(group, rank, size, 10, 0, 0);
  world_leave(world, group, &barriers);
}

static void waits_end(struct world *world, int rank, int size) {
  int barriers = 0;
  (void)size;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.entry_timeout = 0.3;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  if (rank == 0) {
    REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_TIMEOUT);
    REQUIRE(strstr(mlxdist_last_error(), "rank 0 waited 0."));
    REQUIRE(strstr(mlxdist_last_error(), "barrier #1 for rank 1, which has not entered it"));
  }
  world_barrier(world, &barriers);
  if (rank == 1) REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_TIMEOUT); /* rank 0's error, reported by rank 0 */
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

/* A rank that leaves while another still needs it is an error on both, at once and not after the timeout. */
static void leaving_early(struct world *world, int rank, int size) {
  int barriers = 0;
  (void)size;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  mlxdist_layout layout = vector(10);
  float *array = filled(rank, 10, 0);
  int status =
      rank == 0 ? mlxdist_all_reduce(group, array, array, &layout, MLXDIST_SUM, 0) : mlxdist_group_finalize(group);
  REQUIRE(status == MLXDIST_MISMATCH);
  REQUIRE(strstr(mlxdist_last_error(), "rank 1 calls finalize, at the end of its program, and rank 0 calls all_sum"));
  free(array);
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

static void send_bytes(struct channel *channel, const struct wire_header *header, uint32_t bytes) {
  memcpy(channel->send_slots, header, sizeof *header);
  struct ibv_sge sge = {.addr = (uintptr_t)channel->send_slots, .length = bytes, .lkey = channel->lkey};
  struct ibv_send_wr request = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
  REQUIRE(ibv_post_send(channel->qp, &request, &bad) == 0);
}

/* A message that was cut off is as good as lost: it does not count, and nothing in it is used. */
static void truncated_message(struct world *world, int rank, int size) {
  static const struct wire_header whole[] = {
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA, .length = 100},
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA, .flags = WIRE_FIRST},
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA},
  };
  static const uint32_t bytes[] = {sizeof *whole + 99, sizeof *whole, sizeof *whole - 1};
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  for (int i = 0; i < 3 && rank == 0; i++) {
    struct wire_header header = whole[i];
    header.sequence = WIRE_START + 1;
    send_bytes(&group->engine->peers[1].endpoint.channels[WIRE_EAGER], &header, bytes[i]);
  }
  all_reduce(group, rank, size, 10, 0, 0);
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  REQUIRE(stats.damaged == (rank == 1 ? 3 : 0));
  world_leave(world, group, &barriers);
}

/* A message whose bytes make no sense is refused, whatever field is wrong, before anything in it is used. */
static void garbled_message(struct world *world, int rank, int size) {
  static const struct wire_header wrong[] = {
      {.magic = 1, .kind = WIRE_DATA},
      {.magic = WIRE_MAGIC, .kind = 77},
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA, .length = 0xffffffff},
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA, .acks.ack = {WIRE_START + 1000}},
      {.magic = WIRE_MAGIC, .kind = WIRE_DATA, .acks = {{WIRE_START, WIRE_START}, {1000}}},
  };
  int barriers = 0;
  (void)size;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    mlxdist_group *group = world_join(world, rank, &barriers, 0);
    struct channel *channel = &group->engine->peers[!rank].endpoint.channels[WIRE_EAGER];
    if (rank == 0) {
      struct wire_header header = wrong[i];
      header.sequence = WIRE_START + 1;
      send_bytes(channel, &header, sizeof header);
    } else {
      REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_TRANSPORT);
      REQUIRE(strstr(mlxdist_last_error(), "from rank 0"));
    }
    world_barrier(world, &barriers);
    mlxdist_group_destroy(group);
  }
}

/* Two threads split two groups at once, one in the opposite order of the other: no two groups have one number. */
struct splitter {
  mlxdist_group *parent;
  int rank, size;
  int32_t ids[50];
  pthread_t thread;
};

static void *split_often(void *context) {
  struct splitter *splitter = context;
  mlxdist_group *made[50];
  for (int i = 0; i < 50; i++) {
    if ((splitter->rank + i) % 3 == 0) sched_yield();
    REQUIRE(mlxdist_group_split(splitter->parent, 0, splitter->rank, 0, &made[i]) == MLXDIST_OK);
    splitter->ids[i] = mlxdist_group_id(made[i]);
    REQUIRE(all_sum(made[i], splitter->rank, splitter->size, 10) == MLXDIST_OK);
  }
  for (int i = 0; i < 50; i++) mlxdist_group_destroy(made[i]);
  return 0;
}

static void split_at_once(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  struct splitter splitters[2] = {{.rank = rank, .size = size}, {.rank = rank, .size = size}};
  for (int i = 0; i < 2; i++) REQUIRE(mlxdist_group_split(group, 0, rank, 0, &splitters[i].parent) == MLXDIST_OK);
  for (int i = 0; i < 2; i++) {
    struct splitter *next = &splitters[(rank + i) % 2];
    REQUIRE(pthread_create(&next->thread, 0, split_often, next) == 0);
  }
  for (int i = 0; i < 2; i++) pthread_join(splitters[i].thread, 0);
  for (int i = 0; i < 50; i++)
    for (int k = 0; k < 50; k++) REQUIRE(splitters[0].ids[i] != splitters[1].ids[k]);
  for (int i = 0; i < 2; i++) mlxdist_group_destroy(splitters[i].parent);
  world_leave(world, group, &barriers);
}

int main(void) {
  int failed = 0;
  for (int size = 1; size <= 8; size = size < 4 ? size + 1 : size * 2) failed |= world_run(size, every_operation);
  failed |= world_run(2, one_way);
  failed |= world_run(2, cost_of_one_all_sum);
  failed |= world_run(2, copies_of_one_large_all_sum);
  failed |= world_run(1, a_failure_just_before_the_end);
  failed |= world_run(2, different_shapes);
  failed |= world_run(3, different_shapes);
  failed |= world_run(2, different_operations);
  failed |= world_run(3, refused_without_harm);
  failed |= world_run(2, waits_end);
  failed |= world_run(2, leaving_early);
  failed |= world_run(2, split_at_once);
  failed |= world_run(3, split_at_once);
  failed |= world_run(2, garbled_message);
  failed |= world_run(2, truncated_message);
  if (!failed) printf("engine_test passed\n");
  return failed;
}
