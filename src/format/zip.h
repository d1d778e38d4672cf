/* Zip archives as torch.save writes them: stored records, zip64, many archives one behind another in one file. */
#ifndef FORMAT_ZIP_H
#define FORMAT_ZIP_H

#include "format/file.h"

typedef struct loom__zip_record {
    const char *name; /* without the folder that all records of a torch archive lie in; not terminated */
    size_t name_bytes;
    const unsigned char *stored; /* as it lies in the archive */
    size_t stored_bytes, bytes;  /* in the archive, and unpacked */
    uint32_t crc;                /* of the unpacked bytes */
    bool deflated;
} loom__zip_record;

typedef struct loom__zip {
    const char *what; /* for messages: the file, and where in it; borrowed */
    loom__zip_record *records;
    int64_t count;
} loom__zip;

/* The records of the archive that fills these bytes exactly (borrowed until the close); offsets inside count from its
 * begin. Every record lies inside. Methods beside stored and deflated are refused by name. */
loom_status loom__zip_open(const char *what, const void *data, size_t bytes, loom__zip *zip);
/* A cleared struct is accepted. */
void loom__zip_close(loom__zip *zip);
/* The record of that name, or NULL. */
const loom__zip_record *loom__zip_find(const loom__zip *zip, const char *name);
/* The same, or LOOM_ERR_FORMAT naming the archive and the record. */
loom_status loom__zip_get(const loom__zip *zip, const char *name, const loom__zip_record **record);
/* Compares the checksum of the unpacked bytes (given) with what the archive says. */
loom_status loom__zip_check(const loom__zip *zip, const loom__zip_record *record, const void *unpacked);
/* Unpacks a deflated record into out [record->bytes]. */
loom_status loom__zip_inflate(const loom__zip *zip, const loom__zip_record *record, void *out);

/* Writing one archive in torch's form to an open file: records aligned to 64 bytes from the begin of the archive, sizes
 * and checksums behind the data, zip64 end records. */
typedef struct loom__zip_writer loom__zip_writer;
/* Begins at the file's present end; the file is borrowed until the finish or destroy. */
loom_status loom__zip_writer_create(loom__new_file *file, loom__zip_writer **writer);
/* One record; name without the folder. */
loom_status loom__zip_writer_add(loom__zip_writer *writer, const char *name, const void *data, size_t bytes);
/* Writes the directory; *bytes is the length of the archive. Then destroy. */
loom_status loom__zip_writer_finish(loom__zip_writer *writer, uint64_t *bytes);
void loom__zip_writer_destroy(loom__zip_writer *writer);

#endif
