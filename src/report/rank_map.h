/* The drawing of a layout, as a part of a page. */
#ifndef REPORT_RANK_MAP_H
#define REPORT_RANK_MAP_H

#include <megaloom/run.h>

/* Whether there can be such a picture. */
loom_status loom__rank_map_check(const loom_layout *layout, const loom_topology_picture *picture);
/* The <svg> element. nodes [ranks] are names of machines for its boxes, neighbours of one name sharing a box; NULL: by
 * ranks_per_node. Errors as loom_topology_write_svg. */
loom_status loom__rank_map_write(
    FILE *out, const loom_layout *layout, const loom_topology_picture *picture, const loom_run_rank *nodes);

#endif
