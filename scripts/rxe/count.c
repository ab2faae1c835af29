/*
 * A plugin of qemu that counts how often the guest's processors run each block of instructions.
 *
 *     qemu-system-x86_64 ... -plugin count.so,counts=COUNTS
 *
 * COUNTS is shared memory: the number of blocks, and `struct block` for each. A block that is translated twice is there
 * twice. benchmarks/verbs_instructions.py reads it while the machine runs. Debian has no package with qemu-plugin.h.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*on_translation)(uint64_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, void (*on_run)(unsigned, void *), int registers,
                                          void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);

#define EXPORT __attribute__((visibility("default")))
#define PROCESSORS 2
#define BLOCKS (1u << 20)

struct block {
  uint64_t address, instructions, runs[PROCESSORS];
};

EXPORT int qemu_plugin_version = 1;

static struct {
  uint64_t count, reserved[3];
  struct block blocks[BLOCKS];
} *counts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void on_run(unsigned processor, void *block) { ((struct block *)block)->runs[processor]++; }

static void on_translation(uint64_t id, struct qemu_plugin_tb *tb) {
  (void)id;
  pthread_mutex_lock(&lock);
  if (counts->count == BLOCKS) {
    fprintf(stderr, "count.so has room for %u blocks\n", BLOCKS);
    exit(1);
  }
  struct block *block = &counts->blocks[counts->count];
  block->address = qemu_plugin_tb_vaddr(tb);
  block->instructions = qemu_plugin_tb_n_insns(tb);
  counts->count++;
  pthread_mutex_unlock(&lock);
  qemu_plugin_register_vcpu_tb_exec_cb(tb, on_run, 0, block);
}

EXPORT int qemu_plugin_install(uint64_t id, const void *machine, int argc, char **argv) {
  (void)machine;
  const char *path = argc == 1 && !strncmp(argv[0], "counts=", 7) ? argv[0] + 7 : 0;
  int file = path ? open(path, O_RDWR | O_CREAT | O_TRUNC, 0600) : -1;
  if (file < 0 || ftruncate(file, sizeof *counts)) return 1;
  counts = mmap(0, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (counts == MAP_FAILED) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
  return 0;
}
