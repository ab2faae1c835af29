#include "tree.h"

/* A node's number counts from the root. Its parent lacks its lowest bit; its children have one more bit below that. */
struct node {
  int32_t number, size, root;
  int32_t lowest; /* bit; for the root the first power of two that is not below `size` */
};

static struct node node_of(const struct operation *operation, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  struct node node = {.number = (group->rank - root + group->size) % group->size, .size = group->size, .root = root};
  node.lowest = 1;
  while (node.lowest < node.size && !(node.number & node.lowest)) node.lowest *= 2;
  return node;
}

static int32_t rank_of(const struct node *node, int32_t number) { return (number + node->root) % node->size; }

void tree_broadcast(struct operation *operation, char *data, uint64_t bytes, int32_t root) {
  struct node node = node_of(operation, root);
  if (node.number > 0) {
    operation_round(operation);
    operation_receive(operation, rank_of(&node, node.number - node.lowest), data, bytes);
  }
  operation_round(operation);
  for (int32_t bit = node.lowest / 2; bit > 0; bit /= 2)
    if (node.number + bit < node.size) operation_send(operation, rank_of(&node, node.number + bit), data, bytes);
}

void tree_reduce(struct operation *operation, const struct reduction *reduction, const char *in, char *out,
                 int32_t root) {
  struct node node = node_of(operation, root);
  bool leaf = node.lowest == 1 || node.number + 1 >= node.size;
  if (node.number > 0 && !leaf) out = operation_scratch(operation, reduction->bytes);
  if (!leaf) {
    operation_round(operation);
    for (int32_t bit = 1; bit < node.lowest; bit *= 2)
      if (node.number + bit < node.size)
        operation_receive(operation, rank_of(&node, node.number + bit), 0, reduction->bytes);
    reduction_add(operation, reduction, in, 0, out, false);
  }
  if (node.number == 0) return;
  operation_round(operation);
  operation_send(operation, rank_of(&node, node.number - node.lowest), leaf ? in : out, reduction->bytes);
}
