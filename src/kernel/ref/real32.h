/* Selects the float build of what follows. */
#undef REAL
#undef REF
#define REAL float
#define REF(name) loom__ref_##name
