/* The reference kernels in two precisions. Each family is one file of plain loops that is compiled twice by including
 * itself: as float (loom__ref_…, the entries of the reference table) and as double (loom__ref64_…, the yardstick of the
 * tests: gradients are checked there by finite differences, and every table against it). They run in the calling thread
 * and take the team only to keep the table's signatures. */
#ifndef KERNEL_REF_REF_H
#define KERNEL_REF_REF_H

#include <megaloom/kernels.h>

#include "kernel/ref/real32.h"

#include "kernel/ref/declarations.h"

#include "kernel/ref/real64.h"

#include "kernel/ref/declarations.h"

#undef REAL
#undef REF

#endif
