/* A room without sources yet, and the umbrella library, still need one translation unit. */
typedef int loom__empty_translation_unit;
