/* Selects the double build of what follows. */
#undef REAL
#undef REF
#define REAL double
#define REF(name) loom__ref64_##name
