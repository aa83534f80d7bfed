"""Copies of DICOM files without identifiers, and the search for what was missed."""
