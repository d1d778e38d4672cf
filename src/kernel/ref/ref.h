/* The reference kernels in four builds. Each family is one file of plain loops that is compiled four times by including
 * itself: as float (loom__ref_…, the entries of the reference table), as double (loom__ref64_…, the yardstick of the
 * tests: gradients are checked there by finite differences, and every table against it), and as float over elements
 * that are kept in bf16 or fp16 (loom__ref_bf16_…, loom__ref_f16_…; NARROW is set). REAL is what is computed in,
 * ELEMENT what an activation or a matrix is kept in. They run in the calling thread and take the team only to keep the
 * table's signatures. */
#ifndef KERNEL_REF_REF_H
#define KERNEL_REF_REF_H

#include <megaloom/kernels.h>

#include "kernel/ref/real32.h"

#include "kernel/ref/declarations.h"

#include "kernel/ref/real64.h"

#include "kernel/ref/declarations.h"

#include "kernel/ref/bf16.h"

#include "kernel/ref/declarations.h"

#include "kernel/ref/f16.h"

#include "kernel/ref/declarations.h"

#include "kernel/ref/unset.h"

#endif
