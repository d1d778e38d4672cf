/* The drawing of a layout, as a part of a page. */
#ifndef REPORT_RANK_MAP_H
#define REPORT_RANK_MAP_H

#include <megaloom/run.h>

enum { LOOM__EXPERTS_TEXT = 96 };
/* ", experts etp 1 × ep 4 × edp 2": how the ranks of a stage are cut for experts, where that is another way; "" where
 * it is not. */
void loom__rank_map_experts(const loom_layout *layout, char text[LOOM__EXPERTS_TEXT]);
/* Whether there can be such a picture. */
loom_status loom__rank_map_check(const loom_layout *layout, const loom_topology_picture *picture);
/* The <svg> element. nodes [ranks] are names of machines for its boxes, neighbours of one name sharing a box; NULL: by
 * ranks_per_node. Errors as loom_topology_write_svg. */
loom_status loom__rank_map_write(
    FILE *out, const loom_layout *layout, const loom_topology_picture *picture, const loom_run_rank *nodes);

#endif
