{{- define "asr-server.name" -}}
{{- if contains "asr-server" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-asr-server" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- define "asr-server.selector" -}}
app.kubernetes.io/name: asr-server
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "asr-server.labels" -}}
{{ include "asr-server.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "asr-server.claim" -}}
{{ .Values.models.persistence.existingClaim | default (printf "%s-models" (include "asr-server.name" .)) }}
{{- end }}
{{- define "asr-server.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "asr-server.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}
{{- define "asr-server.maxPods" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}{{ else if .Values.keda.enabled }}{{ .Values.keda.maxReplicas }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}
{{- define "asr-server.hasSingleVolume" -}}
{{- with .Values.models.persistence }}{{ if and .enabled (ne .accessMode "ReadWriteMany") }}true{{ end }}{{ end }}
{{- end }}
