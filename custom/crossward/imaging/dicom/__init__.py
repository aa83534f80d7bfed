"""DICOM files: what their headers say, and their pixels in the units of the modality."""
