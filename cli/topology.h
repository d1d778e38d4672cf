/* The two forms in which `megaloom topology` writes a layout on standard output. The rank must be one of the layout's;
 * a failed write shows in ferror(stdout). */
#ifndef CLI_TOPOLOGY_H
#define CLI_TOPOLOGY_H

#include <megaloom/layout.h>

/* Every kind of group with its groups, about a line each. */
void loom_cli_topology_table(const loom_layout *layout);
/* What the rank is, and its place in each of its groups. */
void loom_cli_topology_rank(const loom_layout *layout, int64_t rank);

/* All groups, and the facts of all ranks. `sizes` is what the user gave, before the layout completed it. */
void loom_cli_topology_json(const loom_layout *layout, const loom_parallel_sizes *sizes);
/* The facts of one rank, and the members of its groups. */
void loom_cli_topology_json_rank(const loom_layout *layout, int64_t rank);

#endif
