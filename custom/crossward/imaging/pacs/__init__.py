"""Images from an archive (PACS), over DICOMweb and the DICOM network service."""
